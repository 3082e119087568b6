"""Compare the batches of the ranks that share it: each gives the whole one, and the model cuts it.

A number is made of the integers of a batch, and of the bits of its embeddings. The ranks exchange it once a forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.agreement.store import listed
from dfa_megatron.runtime.comm.groups import channel_of

_COMPARES = Kind.of("compares its batch with those of the other ranks")

_ODD = (-7046029254386353131, 0x2545F4914F6CDD1D)
"""Factors that spread numbers over 64 bits."""

EMBEDDED = "inputs_embeds"
"""The only floating-point tensor of a batch whose values are compared."""


def number_of(batch: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return an int64 that other values of a batch, or other places of them, change."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name in sorted(batch):
        x = _flat(batch[name]).to(device)
        sizes = torch.tensor(x.shape, dtype=torch.int64, device=device)
        if x.is_floating_point():
            x = _bits(x) if name == EMBEDDED else x.new_zeros(0)  # images and sound go with their tokens
        values = torch.cat((torch.tensor([*name.encode()], device=device), sizes, x.flatten().long()))
        mixed = (values + torch.arange(1, len(values) + 1, device=device) * _ODD[0]) * _ODD[1]
        total = total + ((mixed ^ (mixed >> 29)) * _ODD[0]).sum()
    return total


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return a sum of the bits of each token, (batch, seq)."""
    whole = x.detach().contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])
    return whole.sum(-1, dtype=torch.int64)


def _flat(value: Any) -> torch.Tensor:
    """Return a tensor as it is, integers in lists of any depth as one tensor, and a number of a tree or a mask."""
    if isinstance(value, Tree | Mask):
        return torch.tensor([crc32(repr(value).encode())])
    if not isinstance(value, list | tuple):
        return torch.as_tensor(value)
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(_flat(each).flatten() for each in value)])


def check_same(group: str, batch: Mapping[str, Any] | None, tokens: torch.Tensor | None) -> None:
    """Check that the ranks of a group have the same batch; collective, with one small message.

    Args:
        batch: of which a number is made. None where this rank refuses its call, which it tells the others.
        tokens: (batch, seq) or (batch, seq, hidden) of the batch, for the message.

    Raises:
        UnsupportedError: they have other batches; all raise it.
        DisagreementError: another rank refuses its call; AbsentError: one does not come.
    """
    over = channel_of(group, verify=True) if group else None  # where a wait can be given up
    if over is None:
        return
    facts = torch.zeros(4, dtype=torch.int64)
    if batch is None or tokens is None:
        facts[0] = 1
    else:
        facts[1], facts[2], facts[3] = number_of(batch, tokens.device).cpu(), tokens.shape[0], tokens.shape[1]
    every = torch.stack(over.gather(facts, _COMPARES)).tolist()
    refusing = [rank for rank, facts_of_rank in enumerate(every) if facts_of_rank[0]]
    if refusing:
        if batch is None:
            return
        raise DisagreementError(
            f"rank {listed(refusing)} of the group refuses its part of this batch; the error there says why"
        )
    if len({tuple(facts_of_rank) for facts_of_rank in every}) > 1:
        table = "".join(
            f"\n    rank {rank}: {rows} x {length} tokens, number {number & 0xFFFFFFFF:08x}"
            for rank, (_, number, rows, length) in enumerate(every)
        )
        raise UnsupportedError(
            "batches that differ between the ranks of a sequence",
            "each rank must give the whole batch, of which the model takes its part",
            "the same samples on every rank of a group, not cut: a DistributedSampler with num_replicas and rank of "
            "the groups, not of all ranks; loaders prepared after distribute_accelerator; the same data set, collator "
            f"and seed. The ranks have:{table}",
        )
