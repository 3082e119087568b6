"""Numbers of each token, from the ranks of a sequence back to the caller's documents."""

from __future__ import annotations

from itertools import pairwise

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import Layout, zigzag_documents
from dfa_megatron.runtime.comm.compared import together
from dfa_megatron.runtime.comm.groups import Group, group_size
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, check_offsets, offsets_of
from dfa_megatron.sharding import unshard_sequence

BY_DOCUMENT = "zigzag_documents"
"""The layout of packs as Transformer Engine and Megatron cut them: every document zigzag by itself."""


@together
def by_document(
    values: torch.Tensor, cu_seqlens: CuSeqlens = None, *, group: Group = None, layout: str | Layout = "contiguous"
) -> list[torch.Tensor]:
    """Return the numbers of each document on every rank, in the order of the caller's whole row.

    They are the same with any number of ranks and in any layout. A collective call; gradients as of `unshard_sequence`.

    Args:
        values: (..., local tokens) such as `TokenScores.logprobs`, in the labels' shape: a row of tokens in this
            rank's order.
        cu_seqlens: int32 (documents + 1), offsets into the whole row, with the documents' padding if they have any;
            None is one document.
        group: the ranks that share the row.
        layout: how the row was cut. As for `shard_sequence` where it was cut as a whole, also by Megatron's slicing
            without documents: that is "zigzag". "zigzag_documents" where every document was cut zigzag by itself, as in
            the packs of Megatron, Transformer Engine and their trainers (`data_layout="boundary"`).

    Returns:
        For each document (..., tokens). With the labels of next tokens, its last number is that of an ignored label.

    Raises:
        UnsupportedError: as `unshard_sequence` does, for instance for offsets that do not end with the row; "zigzag"
            for documents that may as well have been cut one by one.
    """
    offsets, ranks = None if cu_seqlens is None else offsets_of(cu_seqlens), group_size(group)
    lengths = [hi - lo for lo, hi in pairwise(offsets or ())]
    if offsets is not None:
        check_offsets(offsets)
    if layout == BY_DOCUMENT:
        layout = "zigzag" if offsets is None else zigzag_documents(offsets, ranks)
    elif layout == "zigzag" and ranks > 1 and len(lengths) > 1 and not any(n % (2 * ranks) for n in lengths):
        raise UnsupportedError(
            f"documents of multiples of {2 * ranks} tokens in layout 'zigzag'",
            "each may have been cut by itself, as Megatron cuts packs, or the row as a whole",
            f"layout={BY_DOCUMENT!r}; or, of a row cut as a whole, by_document without cu_seqlens, and its split",
        )
    whole = unshard_sequence(values, group=group, layout=layout, dim=values.dim() - 1, cu_seqlens=offsets)
    return [whole] if offsets is None else list(whole.split(lengths, dim=-1))
