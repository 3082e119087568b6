"""Megatron's --sft: its dataset pads every conversation to 2 x CP tokens, and Transformer Engine cuts it zigzag."""

from __future__ import annotations

import os
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import harness
from tests.megatron.harness import BATCH, MEGATRONS, SEQUENCE, Topology
from tests.megatron.test_launched_training import needs_training
from tests.megatron.test_packed_scripts import HERE, SCRIPT
from tests.support.workers import run_ranks

LENGTHS = ((5, 3, 21), (9, 60), (1, 2, 4, 13), (46, 7))
"""Characters of the conversations in every sample; the second and the last are too long for it."""


class Tokenizer:
    """As Megatron's SFT tokenizers, a token a character; the first of a conversation counts as a prompt."""

    eod, pad = 1, 0

    def tokenize_conversation(self, conversation: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor(list("".join(message["content"] for message in conversation).encode()))
        return tokens, torch.cat((torch.tensor([-100]), tokens[1:]))


def dataset(lengths: tuple[tuple[int, ...], ...], ranks: int, sequence: int) -> Any:
    """Megatron's SFTDataset of such conversations, as its command line makes it for context-parallel ranks."""
    from megatron.training.datasets import sft_dataset

    def keep(self: Any, dataset: Any, path: Any, indices: Any, samples: int, split: Any, config: Any) -> None:
        vars(self).update(dataset=dataset, indices=indices, num_samples=samples, config=config)

    sft_dataset.MegatronDataset.__init__ = keep
    config = SimpleNamespace(context_parallel_size=ranks, tokenizer=Tokenizer(), sequence_length=sequence)
    config.reset_position_ids = config.create_attention_mask = config.reset_attention_mask = False
    prose = bytes(harness.text()[:1000].tolist()).decode()
    samples = [
        [{"role": "system", "content": prose[n : n + length]} for n, length in enumerate(row)] for row in lengths
    ]
    made = sft_dataset.SFTDataset(samples, None, list(range(len(samples))), len(samples), None, config=config)
    assert config.context_parallel_size == ranks
    return made


def batch_of(micro: int, ranks: int) -> dict[str, torch.Tensor]:
    """A micro-batch of those samples."""
    samples = dataset(LENGTHS, ranks, SEQUENCE)
    return torch.utils.data.default_collate([samples[micro * BATCH + row] for row in range(BATCH)])  # type: ignore[no-any-return]


def masked(losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the losses that count."""
    return (losses.flatten() * batch["loss_mask"].flatten()).sum()


def partitioned(cu_seqlens: torch.Tensor, total: int, ranks: int, rank: int) -> torch.Tensor:
    """Stand in for Transformer Engine's thd_get_partitioned_indices."""
    assert int(cu_seqlens[-1]) == total
    documents = [torch.arange(lo, hi).chunk(2 * ranks) for lo, hi in pairwise(cu_seqlens.tolist()) if hi > lo]
    return torch.cat([chunks[at] for chunks in documents for at in (rank, 2 * ranks - 1 - rank)])


def train_by_flags(rank: int, ranks: int, script_path: str) -> None:
    """An unchanged script without our launcher: Megatron's own flags alone, against one rank of its own attention."""
    import megatron.core.utils

    from tests.megatron.test_flag_path import FLAGS, FULL, OURS

    harness.start(Topology(dp=ranks))
    model = harness.make_model(harness.make_config(Topology(), MEGATRONS, sequence_parallel=False), None)
    total = torch.zeros(())
    for micro in range(harness.MICRO_BATCHES):
        batch = batch_of(micro, ranks)
        loss = masked(harness.one_by_one(batch, model), batch)
        loss.backward()
        total += loss.detach()
    assert total > 0

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), CUDA_DEVICE_MAX_CONNECTIONS="1")
    harness.start(Topology(cp=ranks))
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    megatron.core.utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned)
    HERE.batch_of, HERE.loss_of = (lambda micro: batch_of(micro, ranks)), masked
    sys.argv = [script_path, *FLAGS.split(), *OURS.split(), *FULL.split(), "--sft"]
    runpy.run_path(script_path, run_name="__main__")
    assert abs(HERE.total - total) <= 1e-5 * total
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in HERE.model.named_parameters():
        dist.all_reduce(parameter.grad)
        assert (parameter.grad - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name


@pytest.mark.support("megatron", "packed data of Megatron's scripts and datasets")
@needs_training
def test_sft_by_megatrons_flags_alone_trains_like_its_conversations_on_one_rank(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    run_ranks(2, train_by_flags, str(tmp_path / "pretrain_gpt.py"), timeout=120)
