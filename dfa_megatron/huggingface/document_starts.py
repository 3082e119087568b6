"""Find the packed documents of transformers' padding-free batches, once per forward: position 0 starts a document.

Layers get the offsets as Python numbers, so they read nothing back from a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.cu_seqlens import Offsets

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


def of_offsets(given: Mapping[str, Any], batch: int, length: int) -> Documents | None:
    """Return the documents of whole rows from cu_seq_lens_q, whose offsets count through all rows; None without.

    Args:
        given: cu_seq_lens_q, an integer tensor (documents + 1) or numbers, and cu_seq_lens_k, equal to it.
        batch: the number of rows.
        length: the tokens of a row on all ranks.

    Raises:
        UnsupportedError: the keys have other documents, or the offsets do not fit the rows.
    """
    queries, keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if queries is None and keys is None:
        return None
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
            "as transformers' padding-free collators make it of a whole batch, or position_ids",
        )
    return tuple(tuple(offset - lo for offset in offsets if lo <= offset <= hi) for lo, hi in pairwise(ends))


def positions_of(documents: Documents, device: torch.device | None = None) -> torch.Tensor:
    """Return the position of every token in its document, int64 (batch, length)."""
    rows = [torch.cat([torch.arange(hi - lo) for lo, hi in pairwise(offsets)]) for offsets in documents]
    return torch.stack(rows).to(device)


def single(documents: Documents) -> bool:
    """Return whether every row is one document."""
    return all(len(offsets) == 2 for offsets in documents)


def longest(offsets: Offsets) -> int:
    """Return the tokens of the longest document of a row."""
    return max(hi - lo for lo, hi in pairwise(offsets))


def _numbers(offsets: Any) -> Offsets:
    return tuple(offsets.flatten().tolist() if isinstance(offsets, torch.Tensor) else offsets)
