"""Options of a Trainer that act on the length of a sequence, or count: as on one process for each group of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.test_loss_functions import weighed
from tests.huggingface.test_trainer import NAMES, Sequences, built, history, hits, prepare_worker
from tests.support.models import VOCABULARY, build, with_noise
from tests.support.workers import by_turns, over_ranks, run_ranks

ALPHA = 7.0
COUNTED = {"include_num_input_tokens_seen": "all", "gradient_accumulation_steps": 2}
KEYS = ("num_input_tokens_seen", "train_loss", "epoch", "total_flos", "learning_rate")


class Prompts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows padded on the right; prompts without labels fill the first ranks, some rows have holes, some no label."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length, padding = 12 + index % 3, 4 - index % 3
        ids = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: (0, 9, length, 5)[index % 4]] = -100
        labels[index % 5 :: 3] = -100
        zeros = torch.zeros(padding, dtype=torch.long)
        mask = torch.cat((torch.ones_like(ids), zeros))
        return {
            "input_ids": torch.cat((ids, zeros)),
            "labels": torch.cat((labels, zeros - 100)),
            "attention_mask": mask,
        }


class Classes(Prompts):
    """Such rows, each with a class for its label."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index) | {"labels": torch.tensor(index % 3)}


class Shifted(Sequences):
    """Sequences whose labels are shifted already, with more holes."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        shifted = torch.nn.functional.pad(sample["labels"], (0, 1), value=-100)[1:]
        holes = torch.rand(len(shifted), generator=torch.Generator().manual_seed(index)) < 0.4
        return sample | {"shift_labels": shifted.masked_fill(holes, -100)}


class Batches:
    """Metrics that are summed batch by batch."""

    def __init__(self) -> None:
        self.found = 0.0

    def __call__(self, found: Any, compute_result: bool) -> dict[str, float]:
        self.found += float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).sum())
        total = self.found
        self.found = 0.0 if compute_result else self.found
        return {"hits": total, "rows": 0.0}


def classifier() -> Any:
    """A model that scores rows, as `Trainer` trains it with labels of rows."""
    import transformers

    config = build("Llama", pad_token_id=0, num_labels=3).config
    return with_noise(transformers.LlamaForSequenceClassification(config))


def chosen(found: Any) -> dict[str, float]:
    return {"hits": float((found.predictions.argmax(-1) == found.label_ids).sum()), "rows": len(found.label_ids)}


def runs() -> dict[str, dict[str, Any]]:
    """Options by a name for them."""
    return {
        "by length": {
            "train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.2, **COUNTED, "max_steps": -1,
            "num_train_epochs": 2, "eval_accumulation_steps": 1, "compute_metrics": hits,
        },
        "padded": {
            "data": Prompts(), "label_smoothing_factor": 0.2, "max_steps": -1, "num_train_epochs": 1,
            "include_num_input_tokens_seen": "non_padding", "auto_find_batch_size": True,
            "per_device_train_batch_size": 3, "average_tokens_across_devices": False, "batch_eval_metrics": True,
            "compute_metrics": Batches(),
        },
        "classes": {
            "data": Classes(), "model": classifier(), "compute_metrics": chosen, "per_device_train_batch_size": 3,
            **COUNTED, "loss": None,
        },
        "marked loss": {"loss": dfa_hf.sums_tokens(functools.partial(weighed, z=0.1)), **COUNTED},
        "shifted": {"data": Shifted(12), "remove_unused_columns": False, **COUNTED},
    }  # fmt: skip


def trainer(folder: str, data: Any = None, **changes: Any) -> Any:
    data = {
        "train": data or Sequences(12),
        "eval_dataset": data or Sequences(6, seed=50),
        "per_device_eval_batch_size": 1,
    }
    rates = {"eval_strategy": "epoch", "lr_scheduler_type": "cosine", "warmup_steps": 2}
    return built(folder, **{**data, **rates, **changes})


def short_of_memory(run: Any) -> None:
    """Let the first step of a run end for want of memory, as it does on every rank where batches are alike."""
    own, left = run.training_step, [torch.cuda.OutOfMemoryError("CUDA out of memory.")]

    def step(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return own(*args, **kwargs)

    run.training_step = step


def train(rank: int, world_size: int, size: int, folder: str) -> dict[str, Any]:
    prepare_worker(rank, world_size)
    found: dict[str, Any] = {}
    for name, options in by_turns([*runs().items()]):
        tiled, loss = "loss" not in options, options.pop("loss", None)
        run = trainer(folder, **options)
        run.model.loss_function = loss or run.model.loss_function
        for again in range(3 if size > 1 else 0):  # as in a notebook
            dfa_hf.distribute_trainer(run, size=size, config=TrainingConfig(loss_tile=5 + again if tiled else "off"))
        if options.get("auto_find_batch_size"):
            short_of_memory(run)
        run.train()
        assert run.get_train_dataloader().worker_init_fn.keywords["rank"] == rank // size
        logs, found[name] = run.state.log_history, history(run, (*NAMES, *KEYS))
        found[name]["steps"] = [float(run.state.max_steps), float(run.state.global_step), float(run._train_batch_size)]
        rate = "train_samples_per_second"
        samples = [entry[rate] * entry["train_runtime"] for entry in logs if rate in entry]
        callbacks = [type(each).__name__ for each in run.callback_handler.callbacks]
        assert callbacks.count("Stats") == int(size > 1)
        found[name]["samples"] = [round(each, 1) for each in samples]
    for name, said in (("compute_loss_func", "compute_loss_func"), ("compute_loss", "weighed")) if size > 1 else ():
        later = trainer(folder)
        dfa_hf.distribute_trainer(later)
        setattr(later, name, weighed)
        for step in (later.train, later.evaluate):
            with pytest.raises(UnsupportedError, match=said):
                step()
    return found


def test_options_that_count_or_group_by_length_are_those_of_one_process_a_group(tmp_path: Path) -> None:
    wanted = run_ranks(2, train, 1, str(tmp_path), timeout=120)[0]
    for found in run_ranks(4, train, 2, str(tmp_path), timeout=170):
        for name, values in wanted.items():
            for key, value in values.items():
                tolerance = {"rel": 1e-2} if key == "samples" else {"rel": 1e-5, "abs": 1e-7}
                assert found[name][key] == pytest.approx(value, **tolerance), (name, key)
            assert values["num_input_tokens_seen"], name


def shares(table: Any, whole: Any) -> list[float]:
    """The largest noise of each forward, over the bound for a sequence of `whole(local)` tokens; filled later."""
    found: list[float] = []

    def measure(module: Any, args: Any, output: torch.Tensor) -> None:
        bound = ALPHA / (whole(args[0].shape[1]) * output.shape[2]) ** 0.5
        found.append(float((output - module.weight[args[0]]).abs().max() / bound))

    table.register_forward_hook(measure)
    return found


@over_ranks(2, timeout=120)
def test_neftune_scales_its_noise_by_whole_sequences(rank: int, ranks: int, tmp_path: Path) -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    prepare_worker(rank, ranks)
    run = trainer(str(tmp_path), neftune_noise_alpha=ALPHA, max_steps=6, eval_strategy="no")
    dfa_hf.distribute_trainer(run)
    table, own, found = run.model.get_input_embeddings(), run.training_step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        if not found:  # the Trainer has registered its own hook by now
            found.append(shares(table, lambda local: local * ranks + 2 * rank - 1))  # 13 or 17 tokens
        return own(*args, **kwargs)

    run.training_step = step
    run.train()
    assert len(found[0]) == 6
    assert all(0.9 < share <= 1.001 for share in found[0]), found
    assert not hasattr(table, "neftune_noise_alpha")

    model = dfa_hf.distribute_attention(build("Llama"))
    table = model.get_input_embeddings()
    table.neftune_noise_alpha = ALPHA
    table.register_forward_hook(neftune_post_forward_hook)
    length = 8 * ranks
    noise = shares(table, lambda local: length)
    ids = torch.randint(VOCABULARY, (3, length))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    with dfa_hf.local_attention(model):
        model(ids)
    assert len(noise) == 3
    assert all(0.9 < share <= 1.001 for share in noise), noise
    with pytest.raises(IndexError):
        model(input_ids=ids + VOCABULARY)
    assert table.neftune_noise_alpha == ALPHA


@over_ranks(1)
def test_options_that_would_be_wrong_on_parts_are_refused_at_set_up(rank: int, ranks: int, tmp_path: Path) -> None:
    prepare_worker(rank, ranks)
    for options, said in (
        ({"torch_compile": True}, "torch_compile"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"kind": "Seq2SeqTrainer", "predict_with_generate": True}, "predict_with_generate"),
        ({"eval_use_gather_object": True}, "eval_use_gather_object"),
    ):
        run = trainer(str(tmp_path), **options)
        with pytest.raises(UnsupportedError, match=said):
            dfa_hf.distribute_trainer(run)
