"""Packed documents through HF Trainer and accelerate train as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from tests.deepspeed import harness
from tests.deepspeed.test_trainer import KEYS, history, json, parallelism, trainer
from tests.huggingface.test_packed import pack
from tests.support.workers import run_ranks


class Packs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of several documents, as a collator would pack them; every other one begins like a plain sequence.

    Each has six labels, as Trainer's loss with DeepSpeed weighs micro-batches alike: the first, the last, or any.
    """

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = {name: rows[0] for name, rows in pack(24, seed=index).items()}
        if index % 2:
            sample["position_ids"] = torch.cat((torch.arange(12), torch.arange(12)))
        inside = sample["position_ids"].nonzero().flatten()
        mixed = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(index))]
        kept = (inside[:6], inside[-6:], mixed[:6])[index % 3]
        sample["labels"] = torch.full_like(sample["input_ids"], -100).index_copy(0, kept, sample["input_ids"][kept])
        return sample


def packed_trainer(folder: str, **arguments: Any) -> Any:
    made = trainer(folder, **arguments)
    made.model.config.use_cache = False  # with a cache transformers does not look for documents
    made.train_dataset = made.eval_dataset = Packs()
    return made


def alone(rank: int, world_size: int, folder: str) -> list[list[float]]:
    run = packed_trainer(folder)
    run.train()
    return history(run)


def together(rank: int, world_size: int, folder: str) -> list[list[float]]:
    harness.prepare_worker(rank)
    dfa_ds.install()
    run = packed_trainer(folder, deepspeed=json(3, checkpoint="remat"), **parallelism(world_size))
    run.train()
    return history(run)


def test_trainer_keeps_documents_apart_that_accelerate_has_cut(tmp_path: Any) -> None:
    wanted = run_ranks(1, alone, str(tmp_path), timeout=120)[0]
    for found in run_ranks(2, together, str(tmp_path), timeout=170):
        for mine, want, name in zip(found, wanted, KEYS, strict=True):
            assert mine == pytest.approx(want, rel=1e-4), name
