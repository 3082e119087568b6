"""A Trainer without DeepSpeed, whose ranks share sequences, trains and evaluates as it does on one process.

accelerate's own field, flags and launcher may say so: with patches/accelerate, or without.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import hooks
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.support.models import TRAINING, build, text
from tests.support.pages import ROOT
from tests.support.workers import over_ranks, run_ranks
from tests.test_patches import git_apply

STEPS = 3


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of lengths that no number of ranks divides; some are packs.

    Labels lie unevenly: some ranks have none, among the first ones or the last.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.count:  # a Trainer that looks for lengths reads to the end
            raise IndexError(index)
        length = 13 + 4 * (index // 2 % 2)
        sample = text(1, length, seed=self.seed + index, unlabelled=1 + 5 * (index % 3))
        documents = [torch.arange(5), torch.arange(length - 5)] if index // 2 % 2 else [torch.arange(length)]
        labels = sample["labels"][0]
        if index % 4 == 3:
            labels = torch.where(torch.arange(length) < 7, sample["input_ids"][0], -100)
        labels[5 if len(documents) > 1 else 0] = -100
        return {"input_ids": sample["input_ids"][0], "labels": labels, "position_ids": torch.cat(documents)}


class HalfUnlabelled(Sequences):
    """Batches of which the later ones have no label that counts: their loss is NaN, and Trainer leaves it out."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return sample if index < self.count // 2 else sample | {"labels": torch.full_like(sample["labels"], -100)}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Three sequences that no index finds, as of a streamed data set."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        data = Sequences(3, seed=70)
        return (data[index] for index in range(3))


def hits(found: Any) -> dict[str, float]:
    predictions, labels = found.predictions.argmax(-1)[:, :-1], found.label_ids[:, 1:]
    return {"hits": float((predictions == labels)[labels != -100].sum()), "rows": float(len(labels))}


def built(folder: str, kind: str = "Trainer", model: Any = None, train: Any = None, **more: Any) -> Any:
    """A Trainer of a kind; `more` are its arguments, what it is given beside them, or data for "evaluation"."""
    import transformers

    names = ("compute_metrics", "compute_loss_func", "eval_dataset")
    others = {name: more.pop(name) for name in names if name in more}
    settled = getattr(transformers, f"{kind.removesuffix('Trainer')}TrainingArguments")
    return getattr(transformers, kind)(
        model=build("Llama") if model is None else model,
        args=settled(**{**TRAINING, "output_dir": folder, "per_device_train_batch_size": 1, **more}),
        train_dataset=train or Sequences(4 * STEPS),
        **others,
    )


def trainer(folder: str, data: int, **changes: Any) -> Any:
    """A Trainer whose steps see the same samples with any number of data-parallel groups."""
    arguments = {
        "per_device_eval_batch_size": 2 // data, "gradient_accumulation_steps": 4 // data,
        **dict.fromkeys(("max_steps", "eval_steps"), STEPS), "save_strategy": "steps", "save_steps": STEPS - 1,
        "eval_dataset": Sequences(6, seed=50),
    }  # fmt: skip
    return built(folder, **{**arguments, **changes})


NAMES = ("loss", "grad_norm", "eval_loss", "eval_hits", "eval_rows")


def history(run: Any, names: Sequence[str] = NAMES) -> dict[str, list[float]]:
    """Losses, norms of gradients, evaluation, and what else is asked for, of all steps."""
    return {name: [float(entry[name]) for entry in run.state.log_history if name in entry] for name in names}


def assert_history(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


def prepare_worker(rank: int, world_size: int) -> None:
    """Set what a launcher would have set."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    os.environ.update({**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})


def alone(rank: int, world_size: int, folder: str) -> Any:
    run = trainer(folder, 1, compute_metrics=hits)
    run.train()
    found = history(run), parameters_of(run), run.predict(Sequences(3, seed=70)).predictions
    return *found, run.evaluate(HalfUnlabelled(4))["eval_loss"]


def sharded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments for FSDP2, which accelerate knows on GPUs only: it is told that it has some."""
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer

    own = Trainer.create_accelerator_and_postprocess

    def create(run: Any) -> None:
        AcceleratorState._reset_state()
        PartialState._shared_state["distributed_type"] = "MULTI_GPU"
        own(run)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)
    return {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def together(rank: int, world_size: int, folder: str) -> Any:
    from accelerate import ParallelismConfig

    prepare_worker(rank, world_size)
    dfa_hf.add_cp_backend()
    monkeypatch, found = pytest.MonkeyPatch(), list[Any]()
    for size in (world_size, 2):
        data = world_size // size
        changes = {} if size == world_size else sharded(monkeypatch)
        told = {"dp_shard_size": data if changes else 1, "cp_size": size}
        options = (TrainingConfig(checkpoint="remat"), TrainingConfig(loss_tile=5))
        first, later = (ParallelismConfig(**told, cp_backend="dfa", cp_handler=config) for config in options)
        asked = {} if changes else {"parallelism_config": first}
        run = trainer(f"{folder}/{size}", data, compute_metrics=hits, **changes, **asked)
        if changes:
            dfa_hf.distribute_trainer(run, size=size, config=options[0])
        run.train()
        again = trainer(f"{folder}/{size}", data, **changes, **({"parallelism_config": later} if changes else {}))
        if not changes:
            dfa_hf.distribute_trainer(again, size=size, config=options[1])
        again.train(resume_from_checkpoint=f"{folder}/{size}/checkpoint-{STEPS - 1}")
        predicted = (run.predict(Stream()) if data == 1 else again.predict(Sequences(3, seed=70))).predictions
        seen = (
            history(run), {name: values[-1:] for name, values in history(again).items()}, parameters_of(run),
            parameters_of(again), predicted,
        )  # fmt: skip
        found.append((*seen, [one.evaluate(HalfUnlabelled(4))["eval_loss"] for one in (run, again)]))
    again.model.eval()
    sample = {name: value[None] for name, value in Sequences(1, seed=rank)[0].items()}
    with pytest.raises(UnsupportedError, match="batches that differ between the ranks"):
        again.model(**sample)
    sample = {name: value[None] for name, value in Sequences(3)[2].items()}
    with pytest.raises(UnsupportedError, match="logits_to_keep"):
        again.model(**sample, logits_to_keep=1)
    with pytest.raises(UnsupportedError, match="evaluation on data without a length"):
        again.evaluate(Stream())
    count = again._get_num_items_in_batch([sample], torch.device("cpu"))  # by which TRL divides its loss itself
    assert float(count) == world_size / size * int((sample["labels"][:, 1:] != -100).sum())
    again.compute_loss = lambda model, inputs, **_: model(**inputs).logits.exp().sum()
    with pytest.raises(UnsupportedError, match=r"lambda.* of this rank's tokens alone"):
        dfa_hf.distribute_trainer(again, size=2)
    return found


def parameters_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: whole(value.detach()) for name, value in run.model.named_parameters()}


def whole(value: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def test_trainer_with_ddp_and_fsdp2_has_the_steps_evaluation_and_resumed_steps_of_one_process(tmp_path: Path) -> None:
    ((wanted, parameters, predicted, half),) = run_ranks(1, alone, str(tmp_path / "one"), timeout=120)
    last = wanted["loss"][-1:] + wanted["eval_loss"]
    for ranks in run_ranks(4, together, str(tmp_path), timeout=170):
        for first, resumed, mine, mine_resumed, predictions, halves in ranks:
            assert halves == pytest.approx([half, half], rel=1e-5)
            assert_history(first, wanted)
            assert resumed["loss"] + resumed["eval_loss"] == pytest.approx(last, rel=1e-5)
            torch.testing.assert_close(mine, parameters, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(mine_resumed, parameters, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(torch.from_numpy(predictions), torch.from_numpy(predicted), rtol=1e-4, atol=1e-5)


def take_patched(folder: str) -> None:
    """Let this process, which has imported accelerate, have the patched files of it."""
    import accelerate
    from accelerate import accelerator, parallelism_config
    from accelerate.commands import launch
    from transformers import trainer as trainers

    for module in (parallelism_config, accelerator, launch):
        source = Path(folder, *module.__name__.split(".")).with_suffix(".py").read_text("utf-8")
        exec(compile(source, module.__name__, "exec"), vars(module))  # noqa: S102 (accelerate's, with our patch)
    accelerate.ParallelismConfig = parallelism_config.ParallelismConfig
    accelerate.Accelerator = trainers.Accelerator = accelerator.Accelerator


def of_launcher(*flags: str) -> dict[str, str]:
    """What `accelerate launch` tells the ranks of a script."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "no", "--use_parallelism_config", *flags, "x"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(given))
    return {name: value for name, value in prepare_multi_gpu_env(args).items() if "PARALLELISM_CONFIG" in name}


def by_flags(rank: int, world_size: int, folder: str) -> Any:
    """Train with the patched accelerate, by the launcher's flags alone."""
    prepare_worker(rank, world_size)
    take_patched(folder)
    os.environ.update(of_launcher("--parallelism_config_cp_size", "2", "--parallelism_config_cp_backend", "dfa"))
    run = trainer(folder, 1, compute_metrics=hits)
    run.train()
    return history(run), parameters_of(run), hooks.replaced()


def test_a_trainer_by_the_flags_of_a_patched_launcher_is_that_of_one_process(tmp_path: Path) -> None:
    import accelerate

    patch = ROOT / "patches" / "accelerate" / f"v{importlib.metadata.version('accelerate')}.patch"
    if not patch.exists():
        pytest.skip("there is no patch for the installed version")
    for name in re.findall(r"^--- a/(.*)$", patch.read_text("utf-8"), re.MULTILINE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(accelerate.__file__).parents[1] / name, tmp_path / name)
    git_apply(patch, tmp_path)
    ((wanted, parameters, *_),) = run_ranks(1, alone, str(tmp_path / "one"), timeout=120)
    for found, mine, replaced in run_ranks(2, by_flags, str(tmp_path), timeout=120):
        assert_history(found, wanted)
        torch.testing.assert_close(mine, parameters, rtol=1e-4, atol=1e-6)
        assert not [name for name in replaced if name.endswith("__init__")]


@over_ranks(2)
def test_sizes_that_do_not_fit_are_refused_and_the_names_can_be_put_back(rank: int, ranks: int) -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState

    prepare_worker(rank, ranks)
    dfa_hf.add_cp_backend()
    with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size 2, but found 6 ranks"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=3, cp_size=2, cp_backend="dfa"))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(UnsupportedError, match="size=4 on 2 ranks"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=4, cp_backend="dfa"))
    with pytest.raises(UnsupportedError, match="TrainingConfig"):
        ParallelismConfig(cp_size=2, cp_backend="dfa", cp_handler="remat")
    with pytest.raises(ValueError, match="cp_backend must be one of"):
        ParallelismConfig(cp_size=2, cp_backend="ring")
    told: dict[str, Any] = {"cp_size": 2, "cp_backend": "dfa", "cp_handler": TrainingConfig(checkpoint="remat")}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**told))
    with pytest.raises(UnsupportedError, match="size=1 for a second model"):
        dfa_hf.distribute_accelerator(accelerator, build("Llama"), size=1)
    with pytest.raises(UnsupportedError, match="no transformers model was found"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    ours = {"ParallelismConfig.__post_init__", "Accelerator.__init__", "Trainer.train", "Trainer.evaluate"}
    assert {*hooks.replaced()} == {*ours, "Trainer.predict"}
    assert all(f"`{name.rpartition('.')[2]}`" in page for name in hooks.replaced())
    hooks.restore()
    assert hooks.replaced() == []
    with pytest.raises(ValueError, match="cp_backend must be one of"):
        ParallelismConfig(cp_size=2, cp_backend="dfa")
