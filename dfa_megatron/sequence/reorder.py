"""Tokens that change places between the ranks of a sequence: rolled by some places, or shared out in another way."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from operator import index

import torch
from torch._compile import _disable_dynamo

from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout, cut_at
from dfa_megatron.rows import row_by_row
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import compared, facts_of_tokens, telling, together
from dfa_megatron.runtime.comm.groups import Group, resolve
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets, check_offsets, describe, offsets_of
from dfa_megatron.runtime.execute.moves import Moves, move_rows, moves_between
from dfa_megatron.sharding import layout_of_tokens


@_disable_dynamo
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
        UnsupportedError: x does not hold the rank's tokens of the layout, or cu_seqlens do not fit them.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    shift = index(shift)
    with telling(group) as over:
        offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
        if offsets:
            check_offsets(offsets)
        whole = _whole(x, dim, layout, over, offsets)
    moves = _rolled(whole, shift, offsets, 0 if over is None else over.rank, x.device)
    facts, about = facts_of_tokens(x, dim), (str(whole), describe(offsets))
    exchange = compared(f"a roll by {shift}", over, facts, x.device, *about)
    return move_rows(x, moves, resolve(group), fill, exchange, dim=dim)


@_disable_dynamo
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

    Example:
        Layers that run on some of the tokens, shared out evenly again, as in SUBLLM (arXiv 2406.06571)::

            lies = kept_layout(kept)                            # bool (local_seq,)
            even = layouts.contiguous(lies.length, ranks)       # of the layers between
            y = layers(reshard(x[:, kept], lies, even))
            x = x.index_copy(1, kept.nonzero().squeeze(1), reshard(y, even, lies))

    Raises:
        UnsupportedError: x does not hold the rank's tokens of `source`, or `target` is of another length.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    with telling(group) as over:
        if isinstance(source, str) and isinstance(target, Layout):
            source = layout_of_tokens(source, target.length, target.ranks)
        source = _whole(x, dim, source, over)
        target = layout_of_tokens(target, source.length, source.ranks)
    moves = _between(source, target, 0 if over is None else over.rank, x.device)
    facts, about = facts_of_tokens(x, dim), (str(source), str(target))
    exchange = compared("tokens in another layout", over, facts, x.device, *about)
    return move_rows(x, moves, resolve(group), exchange=exchange, dim=dim)


@_disable_dynamo
def kept_layout(kept: torch.Tensor, *, group: Group = None, layout: str | Layout = "contiguous") -> Layout:
    """Return the layout of the tokens that the ranks keep, each where it is: the source of a `reshard`.

    Collective; the host waits for the counts.

    Args:
        kept: bool (local_seq,), which of its tokens this rank keeps: some, all or none.
        group, layout: as for `roll_sequence`, of the whole sequence.

    Raises:
        UnsupportedError: kept has not the rank's tokens of the layout.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    with telling(group) as over:
        whole = _whole(kept, 0, layout, over)
    found = torch.zeros(len(whole.chunks), dtype=torch.int64, device=kept.device)
    for chunk, row in whole.offsets(whole.of(0 if over is None else over.rank)).items():
        found[chunk] = kept[row : row + len(whole.chunks[chunk])].sum()
    if over is not None:
        facts = facts_of_tokens(kept, 0)
        with compared("the number of kept tokens", over, facts, kept.device, str(whole)).running(0, kept.device):
            found = torch.stack(over.gather(found)).sum(0)
    counts = found.tolist()
    order = sorted(range(len(counts)), key=lambda chunk: whole.chunks[chunk].lo)
    ends = dict(zip(order, accumulate(counts[chunk] for chunk in order), strict=True))
    some = [chunk for chunk, count in enumerate(counts) if count]
    spans = (Span(ends[chunk] - counts[chunk], ends[chunk]) for chunk in some)
    return Layout(tuple(spans), tuple(whole.owner[chunk] for chunk in some), whole.ranks)


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


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _between(source: Layout, target: Layout, rank: int, device: torch.device) -> Moves:
    held, wanted = ([whole.spans(other) for other in range(source.ranks)] for whole in (source, target))
    return moves_between(held, wanted, rank, device)
