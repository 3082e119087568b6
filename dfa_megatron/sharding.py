"""Convert whole sequences to the tokens of a rank and back, by layout: tokens, labels, positions, hidden states.

Gradients follow torch.distributed's convention: the objective is the *sum* of the losses of the group's ranks.

shard    no message; a rank's gradient is that of its own tokens, zero elsewhere
unshard  all tokens to all ranks; backward: the sum of their gradients, in rank order, which every rank has to run

Gradients are exact if each rank has the loss of its own tokens. They are also exact if one rank alone has the loss; the
others multiply their output by zero and run its backward. If every rank computes the *same* loss on an unsharded
tensor, gradients are P times too large: average them over the group, as data parallelism does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.kernels.leaf import outside_graphs
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.rows import row_by_row
from dfa_megatron.runtime.comm.compared import described, facts_of_tokens, together
from dfa_megatron.runtime.comm.groups import Group, channel_of, resolve
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, balancing_mask, describe, offsets_of, rows_of
from dfa_megatron.runtime.execute.moves import move_rows, moves_between


@row_by_row
def shard_sequence(
    x: torch.Tensor,
    *,
    group: Group = None,
    layout: str | Layout = "contiguous",
    dim: int = 1,
    cu_seqlens: CuSeqlens = None,
) -> torch.Tensor:
    """Return the tokens of this rank, in local order, as a new tensor (x itself in a group of one).

    Args:
        x: any dtype and shape; dimension `dim` is the whole sequence, the same on every rank (which is not checked).
        group: the ranks that share the sequence, in the order of their tokens.
        layout: "contiguous", "zigzag" (chunks r and 2P-1-r of 2P), "load_balanced" (by the work of the documents), or a
            value of `dfa_megatron.layouts`. Where the length does not divide, the first parts are one token longer.
        cu_seqlens: the documents of a pack, as for `dist_flash_attn_varlen_func`; only "load_balanced" depends on them.
            Of each row, a list: x is (batch, ...) then.

    Raises:
        UnsupportedError: an unknown layout or one of other tokens, a process that is not in the group, or cu_seqlens
            that do not fit the sequence.
    """
    rank, size = _membership(group)
    dim = sequence_dim(x, dim)
    whole = layout_of_tokens(layout, x.shape[dim], size, cu_seqlens)
    return x if size == 1 else _part(x, whole, rank, dim)


@outside_graphs
@together
@row_by_row
def unshard_sequence(
    x: torch.Tensor,
    *,
    group: Group = None,
    layout: str | Layout = "contiguous",
    dim: int = 1,
    cu_seqlens: CuSeqlens = None,
) -> torch.Tensor:
    """Return the whole sequence on every rank, in global order (x itself in a group of one); inverse of
    `shard_sequence`.

    Collective in the forward and, if a gradient is needed, in the backward. Shapes are compared first, which makes the
    host wait. It is not meant for the inner loop of training, where the whole sequence fits on no rank.

    Args:
        x: any dtype and shape; dimension `dim` is the local sequence.
        group, layout, cu_seqlens: as for `shard_sequence`.

    Raises:
        UnsupportedError: as for `shard_sequence`.
        DisagreementError: shapes, dtypes, `dim`, `layout` or `requires_grad` differ between ranks; on every rank.
    """
    dim, over = sequence_dim(x, dim), channel_of(group)
    if over is None:
        layout_of_tokens(layout, x.shape[dim], 1, cu_seqlens)
        return x
    offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
    facts = {"exchange": "a whole sequence", **facts_of_tokens(x, dim), "layout": str(layout)}
    facts |= {"documents": describe(offsets) if offsets else "none", "device": over.place(x.device)}
    with over.calls.preparing():
        counts = [int.from_bytes(theirs[:8]) for theirs in over.agree(facts, x.shape[dim].to_bytes(8))]
    whole = layout_of_tokens(layout, sum(counts), over.size, cu_seqlens)
    held = [whole.spans(rank) for rank in range(over.size)]
    if counts != [sum(map(len, spans)) for spans in held]:
        why = f"the ranks of the group bring different parts of a sequence: tokens by rank {counts}, in layout {whole}"
        raise DisagreementError(why)
    moves = moves_between(held, [[Span(0, whole.length)]] * over.size, over.rank, x.device)
    return move_rows(x, moves, described(over, facts), dim=dim)


def local_positions(
    length: int,
    *,
    group: Group = None,
    layout: str | Layout = "contiguous",
    device: torch.device | str | None = None,
    cu_seqlens: CuSeqlens = None,
) -> torch.Tensor:
    """Return the position of every local token, int64 (length / P,), for position embeddings and RoPE.

    Positions count in the whole sequence, or with `cu_seqlens` in the token's own document.

    Args:
        length: tokens of the whole sequence.
        group, layout, cu_seqlens: as for `shard_sequence`.

    Raises:
        UnsupportedError: as for `shard_sequence`.
    """
    rank, size = _membership(group)
    if rows := rows_of(cu_seqlens):
        alike: Any = {"group": group, "layout": layout, "device": device}
        return torch.stack([local_positions(length, cu_seqlens=row, **alike) for row in rows])
    whole = layout_of_tokens(layout, length, size, cu_seqlens)
    positions = positions_of(whole, rank, device)
    if cu_seqlens is None:
        return positions
    starts = torch.tensor(offsets_of(cu_seqlens)[:-1], device=device)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def tree_positions(
    lengths: Sequence[int], parents: Sequence[int], *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return every token's place in its path from the root, int64 (tokens,), for position embeddings and RoPE.

    They are those of the whole sequence: `shard_sequence` takes a rank's part.

    Args:
        lengths, parents: as for `dfa_megatron.masks.prompt_tree`.

    Raises:
        ValueError: they are no trees in depth-first order.
    """
    tree = Tree.of((lengths, parents))
    parts = [torch.arange(lo, lo + length, device=device) for lo, length in zip(tree.places, tree.lengths, strict=True)]
    return torch.cat(parts)


def layout_of_tokens(name: str | Layout, length: int, ranks: int, cu_seqlens: CuSeqlens = None) -> Layout:
    """Return the layout of a sequence, or of a pack of documents: the tokens of each rank.

    Raises:
        UnsupportedError: as for `shard_sequence`.
    """
    if isinstance(name, Layout):
        if (name.length, name.ranks, name.queries) != (length, ranks, None):
            what, why = f"a layout of {name.length} tokens on {name.ranks} ranks", f"there are {length} on {ranks}"
            raise UnsupportedError(what, why, "a layout of these tokens; of two sequences, layout.side('q') or 'kv'")
        return name
    if cu_seqlens is None:
        return by_name(name, length, ranks)
    return layout_of(name, balancing_mask(offsets_of(cu_seqlens), length), ranks)


def positions_of(whole: Layout, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return global token positions, int64 (local_seq,), of a rank's tokens in local order."""
    spans = whole.spans(rank) or (Span(0, 0),)
    return torch.cat([torch.arange(span.lo, span.hi, device=device) for span in spans])


def _part(x: torch.Tensor, whole: Layout, rank: int, dim: int) -> torch.Tensor:
    """Return a copy of one rank's tokens."""
    return torch.cat([x.narrow(dim, span.lo, len(span)) for span in whole.spans(rank) or (Span(0, 0),)], dim)


def _membership(group: Group) -> tuple[int, int]:
    """Return this process's rank in the group, and the group's size."""
    members = resolve(group)
    return (0, 1) if members is None else (members.rank(), members.size())


def sequence_dim(x: torch.Tensor, dim: int) -> int:
    """Return `dim` counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise UnsupportedError(
            f"dim={dim} of a tensor with {x.dim()} dimensions",
            "there is no such dimension",
            f"-{x.dim()} to {x.dim() - 1}",
        )
    return dim % x.dim()
