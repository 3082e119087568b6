"""Rows that move from rank to rank in one all-to-all, and their gradients back in another."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import Compared

_NOTHING = Compared()


class Side(NamedTuple):
    """The rows of one rank before or after a move.

    length: of them. away: those whose token is another rank's on the other side, by that rank, then by token.
    counts: of these, for each rank. kept: those whose token is this rank's on both sides. source: for each row, the
    other side's row of a kept token, else 0. shared: whether other sides of several ranks have one of these tokens.
    """

    length: int
    away: torch.Tensor
    counts: list[int]
    kept: torch.Tensor
    source: torch.Tensor
    shared: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """The rows that one rank sends and receives; a row that it keeps passes through no message.

    before, after: its rows. rank: its number. Where rows before are shared, copies travel; back, they are added.
    """

    before: Side
    after: Side
    rank: int

    def back(self) -> Moves:
        """Return the moves in the other direction."""
        return Moves(self.after, self.before, self.rank)

    def nbytes(self, x: torch.Tensor) -> int:
        """Return the bytes of the rows of x that are sent."""
        return len(self.before.away) * math.prod(x.shape[1:]) * x.itemsize

    def run(
        self, x: torch.Tensor, group: dist.ProcessGroup | None = None, fill: float = 0, over: Channel | None = None
    ) -> torch.Tensor:
        """Return rows by the group's connections, or those of `over`, `fill` where nobody sends. x: (rows, ...)."""
        rows = self.place_own(x, fill=fill)
        result = self.place_others(rows, self.exchanged(x.index_select(0, self.before.away), group, over))
        return result if over is None else over.spoiled(result)[0]

    def exchanged(
        self, outgoing: torch.Tensor, group: dist.ProcessGroup | None = None, over: Channel | None = None
    ) -> torch.Tensor:
        """Send the rows (rows, ...) that go away; return those that come, by rank."""
        incoming = outgoing.new_empty(len(self.after.away), *outgoing.shape[1:])
        given = _bytes(incoming), _bytes(outgoing), self.after.counts, self.before.counts
        if over is not None:
            over.communicator(outgoing.device).all_to_all(*given)
        elif group is not None and group.size() > 1:
            dist.all_to_all_single(*given, group=group)
        return incoming

    def place_own(self, x: torch.Tensor, dim: int = 0, fill: float = 0) -> torch.Tensor:
        """Return the rows after the move, before those of other ranks have come. dim: of the rows.

        A device works on them while the host prepares the exchange. Where rows are summed, return x.
        """
        after, shape = self.after, list(x.shape)
        shape[dim] = after.length
        if after.shared:
            return x
        if len(after.kept) + len(after.away) < after.length:
            kept = x.index_select(dim, after.source[after.kept])
            return x.new_full(shape, fill).index_copy_(dim, after.kept, kept)
        return x.index_select(dim, after.source) if self.before.length else x.new_empty(shape)

    def place_others(self, rows: torch.Tensor, came: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return all rows after the move. rows: of `place_own`. came: of other ranks."""
        return self._sum(rows, came, dim) if self.after.shared else rows.index_copy_(dim, self.after.away, came)

    def _sum(self, x: torch.Tensor, came: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the sum of the rows of all ranks at each place, added in rank order."""
        after, counts, shape = self.after, [*self.after.counts], list(x.shape)
        shape[dim] = after.length
        counts[self.rank] = len(after.kept)
        own = x.index_select(dim, after.source[after.kept])
        total = x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
        at = 0
        for rank, count in enumerate(counts):
            if rank == self.rank:
                total.index_add_(dim, after.kept, own.to(total.dtype))
            else:
                total.index_add_(dim, after.away[at : at + count], came.narrow(dim, at, count).to(total.dtype))
                at += count
        return total.to(x.dtype)


def moves_between(
    held: Sequence[Sequence[Span]], wanted: Sequence[Sequence[Span]], rank: int, device: torch.device | None = None
) -> Moves:
    """Return the moves of one of the ranks, with its rows on a device.

    Args:
        held: for every rank, the tokens of its rows, in the order of the rows; together each token once.
        wanted: for every rank, the tokens that come to its rows, each at most once; below 0 where none comes. Several
            ranks may want a token.
    """

    def runs(mine: Sequence[Span], theirs: Sequence[Sequence[Span]]) -> list[_Stretch]:
        places = sorted((s.lo, s.hi, peer) for peer, its in enumerate(theirs) for s in its if 0 <= s.lo < s.hi)
        ends, found = list(accumulate((end for _, end, _ in places), max)), list[_Stretch]()
        for span, row in zip(mine, accumulate(map(len, mine), initial=0), strict=False):
            for begin, end, peer in places[bisect_right(ends, span.lo) : bisect_left(places, (span.hi,))]:
                if (lo := max(span.lo, begin)) < (hi := min(span.hi, end)):
                    found.append((peer, lo, row + lo - span.lo, row + hi - span.lo))
        return sorted(found)

    def rows(mine: Sequence[Span], runs: list[_Stretch], other: list[_Stretch]) -> Side:
        counts, source = [0] * len(held), torch.zeros(sum(map(len, mine)), dtype=torch.long)
        for peer, _, first, end in runs:
            counts[peer] += end - first if peer != rank else 0
        away = _indices(run for run in runs if run[0] != rank)
        kept, of_other = (_indices(run for run in side if run[0] == rank) for side in (runs, other))  # by token
        source[kept] = of_other
        spans = sorted((first, end) for _, _, first, end in runs)
        shared = any(one[1] > next_one[0] for one, next_one in pairwise(spans))
        return Side(len(source), away.to(device), counts, kept.to(device), source.to(device), shared)

    leave, come = runs(held[rank], wanted), runs(wanted[rank], held)
    return Moves(rows(held[rank], leave, come), rows(wanted[rank], come, leave), rank)


_Stretch = tuple[int, int, int, int]
"""The rank on the other side, the first token, and the first row and the last."""


def _indices(runs: Iterable[_Stretch]) -> torch.Tensor:
    return torch.cat([torch.arange(first, end) for _, _, first, end in runs] or [torch.arange(0)])


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
