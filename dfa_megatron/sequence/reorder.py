"""Tokens that change places between the ranks of a sequence: rolled by some places, or shared out in another way."""

from __future__ import annotations

from functools import lru_cache

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import Compared, compared, telling
from dfa_megatron.runtime.comm.groups import Group, resolve
from dfa_megatron.runtime.cu_seqlens import Offsets, check_offsets, describe, offsets_of
from dfa_megatron.sequence.moves import Moves, move_rows, moves_between
from dfa_megatron.sharding import CuSeqlens, layout_of_tokens


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
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
        UnsupportedError: x does not hold the rank's tokens of the layout, or cu_seqlens do not fit them.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    with telling(group) as over:
        rank, ranks = (0, 1) if over is None else (over.rank, over.size)
        offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
        length = offsets[-1] if offsets else x.shape[dim] * ranks
        whole = layout if isinstance(layout, Layout) else layout_of_tokens(layout, length, ranks, offsets or None)
        if offsets:
            check_offsets(offsets, whole.length)
        check_tokens(x, dim, whole, rank, ranks)
    moves = _rolled(whole, shift, offsets, rank, x.device)
    exchange = _exchange(f"a roll by {shift}", x, dim, over, str(whole), describe(offsets))
    return move_rows(x.movedim(dim, 0), moves, resolve(group), fill, exchange).movedim(0, dim).contiguous()


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def reshard(
    x: torch.Tensor,
    source: str | Layout,
    target: str | Layout = "contiguous",
    *,
    group: Group = None,
    dim: int = 1,
) -> torch.Tensor:
    """Return this rank's tokens in another layout of the same sequence, by one all-to-all; collective.

    Gradients go back in another. The inverse has source and target exchanged.

    Args:
        x: any dtype and shape; dimension `dim` holds this rank's tokens in `source`.
        source, target: names, which mean the length of the other, or that all ranks hold as many tokens; or layouts.
        group: the ranks that share the sequence, in the order of their tokens.

    Raises:
        UnsupportedError: x does not hold the rank's tokens of `source`, or `target` is of another length.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    with telling(group) as over:
        rank, ranks = (0, 1) if over is None else (over.rank, over.size)
        known = (layout.length for layout in (source, target) if isinstance(layout, Layout))
        length = next(known, x.shape[dim] * ranks)
        source, target = (
            layout if isinstance(layout, Layout) else layout_of_tokens(layout, length, ranks)
            for layout in (source, target)
        )
        check_tokens(x, dim, source, rank, ranks)
        if (source.length, ranks) != (target.length, target.ranks):
            what = f"{source.length} tokens of {ranks} ranks to a layout of {target.length} of {target.ranks}"
            raise UnsupportedError(what, "tokens change places only", "layouts of one length and as many ranks")
    moves = _between(source, target, rank, x.device)
    exchange = _exchange("tokens in another layout", x, dim, over, str(source), str(target))
    return move_rows(x.movedim(dim, 0), moves, resolve(group), 0, exchange).movedim(0, dim).contiguous()


def check_tokens(x: torch.Tensor, dim: int, whole: Layout, rank: int, ranks: int) -> None:
    """Refuse a tensor that does not hold the tokens of a rank."""
    wanted = sum(map(len, whole.spans(rank))) if whole.ranks == ranks else -1
    if x.shape[dim] != wanted:
        what = f"{x.shape[dim]} tokens on rank {rank} of {ranks}"
        why = f"the layout of {whole.length} tokens over {whole.ranks} ranks has {max(wanted, 0)} there"
        raise UnsupportedError(what, why, "the part of shard_sequence, or another layout")


def _exchange(what: str, x: torch.Tensor, dim: int, over: Channel | None, *varying: str) -> Compared | None:
    if over is None:
        return None
    facts = {
        "shape": str((*x.shape[:dim], *x.shape[dim % x.dim() + 1 :])),
        "dtype": str(x.dtype),
        "gradient": str(torch.is_grad_enabled() and x.requires_grad),
    }
    return compared(what, over, facts, x.device, *varying)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # training may keep it for a backward
def _rolled(whole: Layout, shift: int, offsets: Offsets, rank: int, device: torch.device) -> Moves:
    """Return the moves of a roll: for the layers and tensors of a batch they are the same."""
    held = [_positions(whole, other) for other in range(whole.ranks)]
    ends = torch.tensor(offsets or (0, whole.length))
    wanted = []
    for places in held:
        document = torch.searchsorted(ends, places, right=True)
        comes = places - shift
        wanted.append(torch.where((ends[document - 1] <= comes) & (comes < ends[document]), comes, -1))
    return moves_between(held, wanted, rank, device)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _between(source: Layout, target: Layout, rank: int, device: torch.device) -> Moves:
    held, wanted = ([_positions(whole, other) for other in range(source.ranks)] for whole in (source, target))
    return moves_between(held, wanted, rank, device)


def _positions(whole: Layout, rank: int) -> torch.Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(span.lo, span.hi) for span in whole.spans(rank))])
