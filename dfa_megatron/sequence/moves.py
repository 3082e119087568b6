"""Rows that move from rank to rank in one all-to-all, and their gradients back in another."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.runtime.comm.compared import Compared

_NOTHING = Compared()


@dataclass(frozen=True, slots=True)
class Moves:
    """The rows that one rank sends, and where those that it receives go; rows travel in token order.

    sent, received: rows of its tensor, and of the result. send_counts, receive_counts: of them, for each rank.
    rows: of its tensor, and of the result.
    """

    sent: torch.Tensor
    received: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    rows: tuple[int, int]

    def back(self) -> Moves:
        """Return the moves in the other direction."""
        return Moves(self.received, self.sent, self.receive_counts, self.send_counts, self.rows[::-1])

    def run(self, x: torch.Tensor, group: dist.ProcessGroup | None, fill: float = 0) -> torch.Tensor:
        """Return the rows of the result, `fill` in those that nobody sends; no autograd. x: (rows, ...)."""
        outgoing = x.index_select(0, self.sent)
        incoming = outgoing
        if group is not None and group.size() > 1:
            incoming = outgoing.new_empty(len(self.received), *x.shape[1:])
            dist.all_to_all_single(
                _bytes(incoming), _bytes(outgoing), self.receive_counts, self.send_counts, group=group
            )
        if len(self.received) == self.rows[1]:
            result = x.new_empty(self.rows[1], *x.shape[1:])
        else:
            result = x.new_full((self.rows[1], *x.shape[1:]), fill)
        return result.index_copy_(0, self.received, incoming)


def moves_between(
    held: Sequence[Sequence[Span]], wanted: Sequence[Sequence[Span]], rank: int, device: torch.device | None = None
) -> Moves:
    """Return the moves of one of the ranks, with its rows on a device.

    Args:
        held: for every rank, the tokens of its rows, in the order of the rows; together each token once.
        wanted: for every rank, the tokens that come to its rows, each at most once; below 0 where none comes.
    """

    def order(mine: Sequence[Span], theirs: Sequence[Sequence[Span]]) -> tuple[torch.Tensor, list[int]]:
        places = sorted((s.lo, s.hi, peer) for peer, its in enumerate(theirs) for s in its if 0 <= s.lo < s.hi)
        found, counts = list[tuple[int, int, int, int]](), [0] * len(theirs)
        for span, row in zip(mine, accumulate(map(len, mine), initial=0), strict=False):
            first = bisect_right(places, span.lo, key=itemgetter(0))
            for begin, end, peer in places[max(0, first - 1) : bisect_left(places, (span.hi,), first)]:
                if (lo := max(span.lo, begin)) < (hi := min(span.hi, end)):
                    found.append((peer, lo, row + lo - span.lo, row + hi - span.lo))
                    counts[peer] += hi - lo
        runs = [torch.arange(first, end) for _, _, first, end in sorted(found)] or [torch.arange(0)]
        return torch.cat(runs).to(device), counts

    sent, send_counts = order(held[rank], wanted)
    received, receive_counts = order(wanted[rank], held)
    rows = sum(map(len, held[rank])), sum(map(len, wanted[rank]))
    return Moves(sent, received, send_counts, receive_counts, rows)


def spans_of(positions: torch.Tensor) -> list[Span]:
    """Return int64 positions (rows,) as spans of adjacent ones, in the order of the rows."""
    cuts = [0, *((positions.diff() != 1).nonzero().squeeze(1) + 1).tolist(), len(positions)]
    return [Span(int(positions[at]), int(positions[end - 1]) + 1) for at, end in pairwise(cuts) if at < end]


def move_rows(
    x: torch.Tensor,
    moves: Moves,
    group: dist.ProcessGroup | None,
    fill: float = 0,
    exchange: Compared = _NOTHING,
) -> torch.Tensor:
    """Run moves like `Moves.run`, and those of gradients back. exchange: compares the ranks' calls."""
    found: torch.Tensor = _MovedRows.apply(x, moves, group, fill, exchange)  # type: ignore[no-untyped-call]
    return found


class _MovedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        moves: Moves,
        group: dist.ProcessGroup | None,
        fill: float,
        exchange: Compared,
    ) -> torch.Tensor:
        ctx.moves, ctx.group, ctx.exchange = moves, group, exchange
        with exchange.running(0, x.device):
            return moves.run(x, group, fill)

    @staticmethod
    @differentiable_once("rows that move between ranks")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.exchange.running(1, gradient.device):
            return ctx.moves.back().run(gradient, ctx.group), None, None, None, None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return (rows, bytes): backends support different dtypes, but all support bytes."""
    return x.view(len(x), math.prod(x.shape[1:])).view(torch.uint8)
