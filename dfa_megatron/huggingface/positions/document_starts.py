"""Find the packed documents of transformers' padding-free batches, once per forward: position 0 starts a document.

`shard_batch` finds them in the whole batch and passes them on as `cu_seq_lens_q` of all ranks. Other loaders cut the
positions. The ranks then tell one another whether each holds a part of one sequence. They exchange their positions only
if one does not. Layers get the offsets as Python numbers, so they read nothing back from a device.
"""

from __future__ import annotations

import functools
import logging
from itertools import groupby, pairwise
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.positions.batch_number import KEY, check_same
from dfa_megatron.runtime.cu_seqlens import Offsets
from dfa_megatron.sharding import unshard_sequence

_warn = functools.cache(logging.getLogger(__name__).warning)

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""The keys by which transformers' collators describe packed documents, with or without position_ids."""

Documents = tuple[Offsets, ...]
"""The token offsets of the documents of every row, in the sequence of all ranks: 0, ..., the row's length."""


def of_positions(positions: torch.Tensor) -> Documents | None:
    """Return the documents of whole rows, or None if these are no positions of documents; waits for the device once.

    Args:
        positions: (batch, length), counted from 0 in every document.
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
    """Return the documents of whole rows from cu_seq_lens_q, whose offsets count through all rows.

    Args:
        given: cu_seq_lens_q, an integer tensor (documents + 1) or numbers, and cu_seq_lens_k, equal to it.
        batch: the number of rows.
        length: the tokens of a row on all ranks.

    Raises:
        UnsupportedError: the keys have other documents, or the offsets do not fit the rows.
    """
    queries, keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    offsets = _numbers(keys if queries is None else queries)
    both = keys is not None and queries is not None and keys is not queries
    if both and _numbers(keys) != offsets:
        raise UnsupportedError(
            "cu_seq_lens_k other than cu_seq_lens_q", "queries and keys must be of the same documents", "the same"
        )
    ends = [row * length for row in range(batch + 1)]
    increasing = all(lo < hi for lo, hi in pairwise(offsets))
    if not offsets or offsets[0] or offsets[-1] != ends[-1] or not increasing or not {*ends} <= {*offsets}:
        ends_of = f"from {offsets[0]} to {offsets[-1]}" if offsets else "without any"
        raise UnsupportedError(
            f"cu_seq_lens_q {ends_of}",
            f"it must hold the offsets of documents in {batch} rows of {length} tokens, those of all ranks",
            "the batches of dfa_megatron.huggingface.shard_batch, which makes it of position_ids",
        )
    return tuple(tuple(offset - lo for offset in offsets if lo <= offset <= hi) for lo, hi in pairwise(ends))


def positions_of(documents: Documents, device: torch.device | None = None) -> torch.Tensor:
    """Return the position of every token in its document, int64 (batch, length)."""
    rows = [torch.cat([torch.arange(hi - lo) for lo, hi in pairwise(offsets)]) for offsets in documents]
    return torch.stack(rows).to(device)


def offsets_of_rows(documents: Documents) -> torch.Tensor:
    """Return cu_seq_lens_q: int32 offsets that count through all rows, on the CPU."""
    length = documents[0][-1]
    whole = [row * length + offset for row, offsets in enumerate(documents) for offset in offsets]
    return torch.tensor([offset for offset, _ in groupby(whole)], dtype=torch.int32)


def single(documents: Documents) -> bool:
    """Return whether every row is one document."""
    return all(len(offsets) == 2 for offsets in documents)


def of_ranks(
    positions: torch.Tensor, plain: torch.Tensor, length: int, group: str, number: torch.Tensor | None = None
) -> Documents | None:
    """Return the documents of rows that are cut over the ranks of a group; None if these are no positions of documents.

    Collective: the ranks exchange one small message. Only if some row has several documents, they exchange positions.

    Args:
        positions: (batch or 1, local_seq), this rank's positions.
        plain: (1, local_seq), this rank's positions if every row is one document.
        length: the tokens of a row on all ranks.
        number: of the whole batch.

    Raises:
        UnsupportedError: the ranks hold parts of other batches, or of several lengths of which no number tells.
    """
    fits = positions.dim() == 2 and positions.shape[1] == plain.shape[1]
    kind = torch.full((), 2, device=plain.device) if not fits else (positions != plain).any().long()
    worst = check_same(number, group, plain.device, kind)
    if worst == 0:
        return ((0, length),) * positions.shape[0]
    every = None if worst == 2 else unshard_sequence(positions, group=group)
    if every is not None and every.shape[1] != length:
        raise UnsupportedError(
            f"rows of {every.shape[1]} tokens without {KEY}",
            "no rank can tell the length of a row from its own part",
            "every key of a batch of dfa_megatron.huggingface.shard_batch",
        )
    whole = None if every is None else of_positions(every)
    local = plain.shape[1]  # of every rank, if there is no number
    if number is None and whole is not None and all(row == (*range(0, row[-1] + 1, local),) for row in whole):
        _warn(
            f"dfa: position_ids begin at 0 on every rank, which means documents of {local} tokens. Parts of longer "
            "sequences have the positions of these: dfa_megatron.huggingface.shard_batch cuts them"
        )
    return whole


def _numbers(offsets: Any) -> Offsets:
    return tuple(offsets.flatten().tolist() if isinstance(offsets, torch.Tensor) else offsets)
