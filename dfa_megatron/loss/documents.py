"""Numbers of each token, from the ranks of a sequence back to the caller's documents."""

from __future__ import annotations

from itertools import pairwise

import torch

from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.cu_seqlens import offsets_of
from dfa_megatron.sharding import CuSeqlens, unshard_sequence


def by_document(
    values: torch.Tensor, cu_seqlens: CuSeqlens = None, *, group: Group = None, layout: str = "contiguous"
) -> list[torch.Tensor]:
    """Return the numbers of each document on every rank, in the order of the caller's whole row.

    They are the same with any number of ranks and in any layout. A collective call; gradients as of `unshard_sequence`.

    Args:
        values: (..., local tokens) such as `TokenScores.logprobs`, one row of tokens in the order of `shard_sequence`.
        cu_seqlens: int32 (documents + 1), offsets into the whole row; None is one document.
        group: the ranks that share the row.
        layout: as for `shard_sequence`; rows in Megatron's layouts `boundary` and `zigzag` are "zigzag". Documents that
            were padded and cut one by one are in neither.

    Returns:
        For each document (..., tokens). With the labels of next tokens, its last number is that of an ignored label.

    Raises:
        UnsupportedError: as `unshard_sequence` does, for instance for offsets that do not end with the row.
    """
    whole = unshard_sequence(values, group=group, layout=layout, dim=values.dim() - 1, cu_seqlens=cu_seqlens)
    if cu_seqlens is None:
        return [whole]
    offsets = offsets_of(cu_seqlens)
    return list(whole.split([hi - lo for lo, hi in pairwise(offsets)], dim=-1))
