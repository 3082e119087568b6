"""Rows that move from rank to rank in one all-to-all, and their gradients back in another."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import Compared

_NOTHING = Compared()


@dataclass(frozen=True, slots=True)
class Moves:
    """The rows that one rank sends, and where those that it receives go; rows travel in token order.

    sent, received: rows of its tensor, and of the result. send_counts, receive_counts: of them, for each rank.
    rows: of its tensor, and of the result. copies: some rows of the tensor go to several ranks. adds: rows of several
    ranks that come to one place are added, in rank order.
    """

    sent: torch.Tensor
    received: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    rows: tuple[int, int]
    copies: bool = False
    adds: bool = False

    def back(self) -> Moves:
        """Return the moves in the other direction."""
        counts = self.receive_counts, self.send_counts
        return Moves(self.received, self.sent, *counts, self.rows[::-1], copies=self.adds, adds=self.copies)

    def nbytes(self, x: torch.Tensor) -> int:
        """Return the bytes of the rows of x that are sent."""
        return len(self.sent) * math.prod(x.shape[1:]) * x.itemsize

    def run(
        self, x: torch.Tensor, group: dist.ProcessGroup | None = None, fill: float = 0, over: Channel | None = None
    ) -> torch.Tensor:
        """Return rows by the group's connections, or those of `over`, `fill` where nobody sends. x: (rows, ...)."""
        outgoing = x.index_select(0, self.sent)
        incoming = outgoing
        if over is not None or (group is not None and group.size() > 1):
            incoming = outgoing.new_empty(len(self.received), *x.shape[1:])
            given = _bytes(incoming), _bytes(outgoing), self.receive_counts, self.send_counts
            if over is None:
                dist.all_to_all_single(*given, group=group)
            else:
                over.communicator(x.device).all_to_all(*given)
                over.spoiled(incoming)
        if self.adds:
            total = x.new_zeros(self.rows[1], *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
            parts = zip(self.received.split(self.receive_counts), incoming.split(self.receive_counts), strict=True)
            for places, part in parts:
                total.index_add_(0, places, part.to(total.dtype))
            return total.to(x.dtype)
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
        wanted: for every rank, the tokens that come to its rows, each at most once; below 0 where none comes. Several
            ranks may want a token.
    """

    def order(mine: Sequence[Span], theirs: Sequence[Sequence[Span]]) -> tuple[torch.Tensor, list[int], bool]:
        places = sorted((s.lo, s.hi, peer) for peer, its in enumerate(theirs) for s in its if 0 <= s.lo < s.hi)
        ends = list(accumulate((end for _, end, _ in places), max))
        found, counts = list[tuple[int, int, int, int]](), [0] * len(theirs)
        for span, row in zip(mine, accumulate(map(len, mine), initial=0), strict=False):
            for begin, end, peer in places[bisect_right(ends, span.lo) : bisect_left(places, (span.hi,))]:
                if (lo := max(span.lo, begin)) < (hi := min(span.hi, end)):
                    found.append((peer, lo, row + lo - span.lo, row + hi - span.lo))
                    counts[peer] += hi - lo
        runs = [torch.arange(first, end) for _, _, first, end in sorted(found)] or [torch.arange(0)]
        rows = sorted((first, end) for _, _, first, end in found)
        return torch.cat(runs).to(device), counts, any(one[1] > other[0] for one, other in pairwise(rows))

    sent, send_counts, copies = order(held[rank], wanted)
    received, receive_counts, _ = order(wanted[rank], held)
    rows = sum(map(len, held[rank])), sum(map(len, wanted[rank]))
    return Moves(sent, received, send_counts, receive_counts, rows, copies)


def move_rows(
    x: torch.Tensor,
    moves: Moves,
    exchange: Compared = _NOTHING,
    *,
    group: dist.ProcessGroup | None = None,
    fill: float = 0,
    dim: int = 0,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run moves of the indices of a dimension like `Moves.run`, and those of gradients back.

    exchange: compares the ranks' calls. known: the result, if the first pass of a checkpointed region has kept it.
    """
    if dim:
        known = None if known is None else known.movedim(dim, 0)
        rows = move_rows(x.movedim(dim, 0), moves, exchange, group=group, fill=fill, known=known)
        return rows.movedim(0, dim).contiguous()
    found: torch.Tensor = _MovedRows.apply(x, moves, exchange, group, fill, known)  # type: ignore[no-untyped-call]
    return found


class _MovedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        moves: Moves,
        exchange: Compared,
        group: dist.ProcessGroup | None,
        fill: float,
        known: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.moves, ctx.group, ctx.exchange = moves, group, exchange
        if known is not None:
            return known.detach()
        with exchange.running(0, x.device, moves.nbytes(x)):
            return moves.run(x, group, fill, exchange.over)

    @staticmethod
    @differentiable_once("rows that move between ranks")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = ctx.moves.back()
        with ctx.exchange.running(1, gradient.device, back.nbytes(gradient)):
            return back.run(gradient, ctx.group, over=ctx.exchange.over), None, None, None, None, None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return (rows, bytes): backends support different dtypes, but all support bytes."""
    return x.view(len(x), math.prod(x.shape[1:])).view(torch.uint8)


_ALIGNMENT = 16
"""Bytes. Kernels load 16 at a time, and read what came where it landed."""


def packed(fields: Sequence[torch.Tensor], lead: int = 1) -> torch.Tensor:
    """Return rows of bytes, uint8 (rows, bytes), with all fields of a row side by side.

    lead: the first dimensions of a field, which count its rows.
    """
    rows = math.prod(fields[0].shape[:lead])
    buffer = fields[0].new_empty((rows, sum(_room(x, lead) for x in fields)), dtype=torch.uint8)
    for into, x in zip(unpacked(buffer, fields, lead), fields, strict=True):
        into.view(x.shape).copy_(x)
    return buffer


def unpacked(buffer: torch.Tensor, like: Sequence[torch.Tensor], lead: int = 1) -> list[torch.Tensor]:
    """Return the fields of `packed` rows as views (rows, ...), whose rows are shaped as those of `like`."""
    found, at = list[torch.Tensor](), 0
    for x in like:
        shape = x.shape[lead:]
        found.append(buffer.view(x.dtype).narrow(1, at // x.itemsize, math.prod(shape)).unflatten(1, shape))
        at += _room(x, lead)
    return found


def _room(x: torch.Tensor, lead: int) -> int:
    """Return the bytes of a row of a field, with what aligns the next field."""
    return -(-math.prod(x.shape[lead:]) * x.itemsize // _ALIGNMENT) * _ALIGNMENT
