"""A Trainer without DeepSpeed, whose ranks share sequences, trains and evaluates as it does on one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.support.models import TRAINING, build, text
from tests.support.workers import run_ranks

STEPS = 3


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of lengths that no number of ranks divides, with labels that lie unevenly; some are packs."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 13 + 4 * (index // 2 % 2)
        sample = text(1, length, seed=self.seed + index, unlabelled=1 + 5 * (index % 3))
        documents = [torch.arange(5), torch.arange(length - 5)] if index // 2 % 2 else [torch.arange(length)]
        labels = sample["labels"][0]
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
        if changes:  # size is then by cp_size
            first = ParallelismConfig(**told)
        run = trainer(f"{folder}/{size}", data, compute_metrics=hits, **changes, parallelism_config=first)
        if changes:
            dfa_hf.distribute_trainer(run, config=options[0])
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
    from torch.distributed.tensor import DTensor

    named = {name: value.detach() for name, value in run.model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def test_trainer_with_ddp_and_fsdp2_has_the_steps_evaluation_and_resumed_steps_of_one_process(tmp_path: Path) -> None:
    ((wanted, parameters, predicted, half),) = run_ranks(1, alone, str(tmp_path / "one"), timeout=120)
    last = wanted["loss"][-1:] + wanted["eval_loss"]
    for ranks in run_ranks(4, together, str(tmp_path), timeout=170):
        for whole, resumed, mine, mine_resumed, predictions, halves in ranks:
            assert halves == pytest.approx([half, half], rel=1e-5)
            for name, values in wanted.items():
                assert whole[name] == pytest.approx(values, rel=1e-5), name
            assert resumed["loss"] + resumed["eval_loss"] == pytest.approx(last, rel=1e-5)
            torch.testing.assert_close(mine, parameters, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(mine_resumed, parameters, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(torch.from_numpy(predictions), torch.from_numpy(predicted), rtol=1e-4, atol=1e-5)
