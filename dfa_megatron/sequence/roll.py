"""Tokens of a sequence that are rolled by some places, between ranks and with their gradients."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from operator import index

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.leaf import outside_graphs
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout, cut_at
from dfa_megatron.rows import row_by_row
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import compared, facts_of_tokens, telling, together
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets, check_offsets, describe, offsets_of
from dfa_megatron.runtime.execute.moves import Moves, move_rows, moves_between
from dfa_megatron.sharding import layout_of_tokens, sequence_dim


@outside_graphs
@together
@row_by_row
def roll_sequence(
    x: torch.Tensor,
    shift: int,
    *,
    group: Group = None,
    layout: str | Layout = "contiguous",
    dim: int = 1,
    cu_seqlens: CuSeqlens = None,
    fill: float = 0,
) -> torch.Tensor:
    """Return for every token what the one `shift` places before it holds: shift=-1 brings the next token's.

    It is `torch.roll` of the whole sequence, but that nothing comes around: where the sequence or the document has no
    such token, the result is `fill`. Collective, also in the backward. Only ranks that hold such tokens exchange
    messages.

    Args:
        x: any dtype and shape; dimension `dim` holds this rank's tokens.
        shift: any number of places, more than a rank holds too.
        group: the ranks that share the sequence, in the order of their tokens.
        layout: the tokens that a rank holds, as for `shard_sequence`.
        cu_seqlens: global offsets of packed documents; None for none.
        fill: -100 for labels.

    Raises:
        UnsupportedError: x does not hold the rank's tokens of the layout, or cu_seqlens or fill do not fit them.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    shift = index(shift)
    with telling(group) as over:
        dim, has_all = sequence_dim(x, dim), x.is_floating_point() or x.is_complex()
        if not has_all and torch.full((), fill, dtype=x.dtype, device="cpu").item() != fill:
            raise UnsupportedError(f"fill={fill} in a tensor of {x.dtype}", "it has no such number", "x.long()")
        offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
        if offsets:
            check_offsets(offsets)
        whole = _whole(x, dim, layout, over, offsets)
    moves = _rolled(whole, shift, offsets, 0 if over is None else over.rank, x.device)
    facts = facts_of_tokens(x, dim) | {"fill": str(fill), "tokens of a rank": f"{whole.length} in all"}
    exchange = compared(f"a roll by {shift}", over, facts, x.device, str(whole), describe(offsets))
    return move_rows(x, moves, exchange, fill=fill, dim=dim)


def _whole(x: torch.Tensor, dim: int, layout: str | Layout, over: Channel | None, offsets: Offsets = ()) -> Layout:
    """Return the tokens of every rank, where x holds those of this one."""
    rank, ranks = (0, 1) if over is None else (over.rank, over.size)
    length = offsets[-1] if offsets else x.shape[dim] * ranks
    length = layout.length if isinstance(layout, Layout) and not offsets else length
    whole = layout_of_tokens(layout, length, ranks, offsets or None)
    whole.check_tokens(rank, x.shape[dim])
    return whole


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # training may keep it for a backward
def _rolled(whole: Layout, shift: int, offsets: Offsets, rank: int, device: torch.device) -> Moves:
    """Return the moves of a roll: for the layers and tensors of a batch they are the same."""
    ends = offsets or (0, whole.length)
    whole = cut_at(whole, (at for end in ends for at in (end, end + shift)))  # all of a chunk comes, or nothing
    held = [whole.spans(other) for other in range(whole.ranks)]
    inside = {s: bisect_right(ends, s.lo) == bisect_right(ends, s.lo - shift) for s in whole.chunks}
    wanted = [[s.shift(-shift) if inside[s] else Span(-len(s), 0) for s in spans] for spans in held]
    return moves_between(held, wanted, rank, device)
