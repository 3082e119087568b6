"""Packed documents of transformers' padding-free batches, found once per forward: a position of 0 begins a document.

With `shard_batch` they are found in the whole batch, before it is cut, and travel as `cu_seq_lens_q` of all ranks.
Other loaders cut the positions: the ranks then tell one another whether each sees one sequence, and, only if one does
not, their positions. Layers get the offsets as numbers; nothing is read back from a device there.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.refusals import BATCHES
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.runtime.cu_seqlens import Offsets

KEYWORD = "dfa_documents"
"""The keyword by which a decoder hands `Documents` on to its layers."""

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What transformers' collators say of packed documents beside, or in place of, position_ids."""

Documents = tuple[Offsets, ...]
"""Of every row of a batch the token offsets of its documents, in the sequence of all ranks: 0, ..., its length."""


def of_positions(positions: torch.Tensor) -> Documents | None:
    """The documents of whole rows, or None if the positions are none; the device is waited for once.

    Args:
        positions: (batch, length), from 0 in every document.
    """
    at = torch.arange(positions.shape[1], device=positions.device)
    starts = positions == 0
    begin = torch.where(starts, at, 0).cummax(1).values
    valid = starts[:, 0].all() & (positions == at - begin).all()
    seen = torch.cat((valid[None], starts.flatten())).cpu()
    if not bool(seen[0]):
        return None
    length: int = positions.shape[1]
    return tuple((*row.nonzero().flatten().tolist(), length) for row in seen[1:].view_as(starts))


def of_offsets(given: dict[str, Any], batch: int, length: int) -> Documents:
    """The documents of whole rows from cu_seq_lens_q, offsets in the rows one after another.

    Args:
        given: with cu_seq_lens_q, an integer tensor (documents + 1) or as many numbers; cu_seq_lens_k must be the same.
        batch: rows.
        length: of each, on all ranks together.

    Raises:
        UnsupportedError: other documents for the keys, or offsets of other rows.
    """
    queries, keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    offsets = _numbers(keys if queries is None else queries)
    both = keys is not None and queries is not None and keys is not queries
    BATCHES.check(other_keys=both and _numbers(keys) != offsets)
    ends = [row * length for row in range(batch + 1)]
    increasing = all(lo < hi for lo, hi in pairwise(offsets))
    if not offsets or offsets[0] or offsets[-1] != ends[-1] or not increasing or not {*ends} <= {*offsets}:
        ends_of = f"from {offsets[0]} to {offsets[-1]}" if offsets else "without any"
        BATCHES.check(offsets=ends_of, rows=batch, length=length)
    return tuple(tuple(offset - lo for offset in offsets if lo <= offset <= hi) for lo, hi in pairwise(ends))


def positions_of(documents: Documents, device: torch.device | None = None) -> torch.Tensor:
    """Of every token its position in its own document, int64 (batch, length)."""
    rows = []
    for offsets in documents:
        starts, length = torch.tensor(offsets[:-1]), torch.arange(offsets[-1])
        rows.append(length - starts[torch.searchsorted(starts, length, right=True) - 1])
    return torch.stack(rows).to(device)


def offsets_of_rows(documents: Documents) -> torch.Tensor:
    """As cu_seq_lens_q: int32 offsets in the rows one after another, on the CPU."""
    length = documents[0][-1]
    whole = [row * length + offset for row, offsets in enumerate(documents) for offset in offsets]
    return torch.tensor([offset for offset, _ in groupby(whole)], dtype=torch.int32)


def single(documents: Documents) -> bool:
    """Whether every row is one document, which needs no packing."""
    return all(len(offsets) == 2 for offsets in documents)


def of_ranks(positions: torch.Tensor, plain: torch.Tensor, local: int, group: str) -> Documents | None:
    """The documents of rows that are cut over the ranks of a group; None if no rank's positions are of documents.

    Collective: one number, and only where some rank holds more than one plain sequence, everybody's positions.

    Args:
        positions: (batch or 1, local_seq), of this rank.
        plain: (1, local_seq), what they are if every row is one document.
        local: tokens of a row that this rank holds.

    Returns:
        For rows that all are one document, these.
    """
    fits = positions.dim() == 2 and positions.shape[1] == local
    kind = torch.full((), 2, device=plain.device) if not fits else (positions != plain).any().long()
    channel = resolve(group) if group else None
    ranks = 1 if channel is None else channel.size()
    if channel is not None:
        dist.all_reduce(kind, op=dist.ReduceOp.MAX, group=channel)
    worst = int(kind)
    if worst == 0:
        return ((0, local * ranks),) * positions.shape[0]
    if worst == 2:
        return None
    parts = [torch.empty_like(positions, memory_format=torch.contiguous_format) for _ in range(ranks)]
    if channel is None:
        parts = [positions]
    else:
        dist.all_gather(parts, positions.contiguous(), group=channel)
    return of_positions(torch.cat(parts, 1))


def _numbers(offsets: Any) -> Offsets:
    return tuple(offsets.flatten().tolist() if isinstance(offsets, torch.Tensor) else offsets)
