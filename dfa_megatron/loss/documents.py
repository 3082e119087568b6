"""Numbers of each token, from the ranks of a sequence back to the caller's documents."""

from __future__ import annotations

from itertools import pairwise

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.comm.groups import Group, group_size
from dfa_megatron.runtime.cu_seqlens import Offsets, check_offsets, offsets_of
from dfa_megatron.sharding import CuSeqlens, unshard_sequence

BY_DOCUMENT = "zigzag_documents"
"""The layout of packs as Transformer Engine and Megatron cut them: every document zigzag by itself."""


def by_document(
    values: torch.Tensor, cu_seqlens: CuSeqlens = None, *, group: Group = None, layout: str = "contiguous"
) -> list[torch.Tensor]:
    """Return the numbers of each document on every rank, in the order of the caller's whole row.

    They are the same with any number of ranks and in any layout. A collective call; gradients as of `unshard_sequence`.

    Args:
        values: (..., local tokens) such as `TokenScores.logprobs`, one row of tokens in this rank's order. Megatron's
            scores are (local tokens, batch): give their transpose.
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
    if cu_seqlens is None:
        layout = "zigzag" if layout == BY_DOCUMENT else layout
        return [unshard_sequence(values, group=group, layout=layout, dim=values.dim() - 1)]
    offsets, ranks = offsets_of(cu_seqlens), group_size(group)
    lengths = [hi - lo for lo, hi in pairwise(offsets)]
    uneven = next((length for length in lengths if length % (2 * ranks)), None)
    if layout == BY_DOCUMENT and ranks > 1:
        whole = _whole(values, offsets, ranks, group, uneven)
    else:
        if layout == "zigzag" and ranks > 1 and len(lengths) > 1 and uneven is None:
            raise UnsupportedError(
                f"documents of multiples of {2 * ranks} tokens in layout 'zigzag'",
                "each may have been cut by itself, as Megatron cuts packs, or the row as a whole",
                f"layout={BY_DOCUMENT!r}; or, of a row cut as a whole, by_document without cu_seqlens, and its split",
            )
        layout = "contiguous" if layout == BY_DOCUMENT else layout
        whole = unshard_sequence(values, group=group, layout=layout, dim=values.dim() - 1, cu_seqlens=offsets)
    return list(whole.split(lengths, dim=-1))


def _whole(values: torch.Tensor, offsets: Offsets, ranks: int, group: Group, uneven: int | None) -> torch.Tensor:
    """Return the whole row of documents that were cut one by one: rank r of P has chunks r and 2P-1-r of each."""
    if uneven is not None:
        raise UnsupportedError(
            f"a document of {uneven} tokens that was cut by itself over {ranks} ranks",
            f"it has {2 * ranks} equal chunks",
            "offsets with the padding of each document (cu_seqlens_q_padded)",
        )
    local = values.shape[-1]
    check_offsets(offsets, local * ranks)
    every = unshard_sequence(values, group=group, dim=values.dim() - 1)  # the ranks' parts, one after another
    places = []
    for lo, hi in pairwise(offsets):
        chunk = (hi - lo) // (2 * ranks)
        for part in range(2 * ranks):
            owner, second = min(part, 2 * ranks - 1 - part), part >= ranks
            at = owner * local + lo // ranks + second * chunk
            places.append(torch.arange(at, at + chunk, device=values.device))
    return every.index_select(-1, torch.cat(places))
