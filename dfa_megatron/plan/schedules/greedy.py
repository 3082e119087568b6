"""Assign work greedily: ranks with much of it give runs of rows to ranks with little, in few and large pieces.

All work starts with the owner of its rows. While the most loaded rank exceeds the mean by more than EVEN, it gives
rows of one document to a rank with less work: as many from an end as bring one of the two to the mean. The piece that
costs least per pair of work is taken. Cost counts transferred rows and kernel calls: one for the helper, and one more
for the owner where its other rows are no longer adjacent. Short documents therefore stay in place, and a pack with long
documents on one side is balanced, whatever the mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.ir import Block, needed_pairs
from dfa_megatron.plan.language.layout import Layout, cut_at
from dfa_megatron.plan.language.mask import Component, Mask, components, kept_on_mask
from dfa_megatron.plan.language.work import EVEN, LAUNCH, MOVED, TILE
from dfa_megatron.plan.schedules.assignments import assign_steps


class Help(NamedTuple):
    """`rank` computes the pairs of q x kv, though it does not own these rows."""

    q: Span
    kv: Span
    rank: int


def greedy(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks of nearly equal work per rank on any mask: first local, then help, then own rows.

    layout: from `cut_for_help`, so that help is of whole chunks.
    """
    given: dict[tuple[int, int], list[Help]] = defaultdict(list)
    for one in help_of(mask, held := layout.joined()):
        given[held.owner_of(one.q.lo), held.owner_of(one.kv.lo)].append(one)
    owned: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
    for q, kv in needed_pairs(mask, layout.chunks):
        rows, keys, owner = layout.chunks[q], layout.chunks[kv], layout.owner[q]
        helpers = given.get((owner, layout.owner[kv]), ())
        rank = next((h.rank for h in helpers if h.q.holds(rows) and h.kv.holds(keys)), owner) if helpers else owner
        owned[rank].append((q, kv))
    return assign_steps(owned, mask, layout)


def cut_for_help(mask: Mask, layout: Layout) -> Layout:
    """Cut contiguous chunks where the rows or keys of a helper begin or end."""
    spans = (span for one in help_of(mask, layout.joined()) for span in one[:2])
    return cut_at(layout, [at for span in spans for at in (span.lo, span.hi)])


@kept_on_mask
def help_of(mask: Mask, layout: Layout) -> tuple[Help, ...]:
    """Return the pairs that ranks compute for others; no two share a pair. layout: in order, and joined."""
    return tuple(_Balance(mask, layout).run())


@dataclass(slots=True)
class _Work:
    """Pairs of one component in the rows of one rank and the keys of rank `home`."""

    home: int
    tiles: list[Tile]
    area: int
    q: Span
    helpers: set[int] = field(default_factory=set)
    half: float = -1.0
    """The share of the pairs that is in the first half of the rows, once it is known."""

    def of_rows(self, q: Span) -> _Work | None:
        """Return the part of this piece in some of its rows, from the first with a pair to the last; None without."""
        tiles = [part for tile in self.tiles if (part := tile.restrict(q, tile.kv))]
        return _work(self.home, tiles, self.helpers) if tiles else None

    def area_in(self, q: Span) -> int:
        """Return the number of pairs in some of the rows."""
        return sum(tile.area_in(q) for tile in self.tiles)

    @property
    def kv(self) -> Span:
        """Return the keys."""
        return Span(min(tile.kv.lo for tile in self.tiles), max(tile.kv.hi for tile in self.tiles))

    def rows_of(self, share: float) -> float:
        """Return the rows from the first that hold this share of the pairs, if rows gain or lose keys evenly."""
        if self.half < 0:
            self.half = self.area_in(Span(self.q.lo, (self.q.lo + self.q.hi) // 2)) / self.area
        half = self.half
        linear, square = 4 * half - 1, 2 - 4 * half
        root = sqrt(max(0.0, linear * linear + 4 * square * share))
        return min(1.0, 2 * share / (linear + root)) * len(self.q) if linear + root > 0 else len(self.q)


def _work(home: int, tiles: list[Tile], helpers: set[int]) -> _Work:
    rows = Span(min(tile.q.lo for tile in tiles), max(tile.q.hi for tile in tiles))
    return _Work(home, tiles, sum(tile.area for tile in tiles), rows, helpers)


class _Move(NamedTuple):
    """A piece, its place among those of the same owner of keys, its new rank, and the rows that move there."""

    cost: float
    place: tuple[int, int]
    target: int
    rows: Span


class _Balance:
    """The work of every rank, while pieces change hands."""

    def __init__(self, mask: Mask, layout: Layout) -> None:
        self.mask, self.layout, self.ranks = mask, layout, (ranks := layout.ranks)
        self.aligned = max(1, min(TILE, mask.length // ranks // 64))
        self.pieces: list[dict[int, list[_Work]]] = [defaultdict(list) for _ in range(ranks)]
        for component in components(mask):
            self._add(component)
        self.load = [sum(piece.area for row in mine.values() for piece in row) for mine in self.pieces]
        self.mean = sum(self.load) / ranks

    def _add(self, component: Component) -> None:
        """Add the pieces of a component."""
        home = self.layout.owner_of(component.span.lo)
        if component.is_document and self.layout.owner_of(component.span.hi - 1) == home:  # the usual case
            self.pieces[home][home].append(_Work(home, [*component.tiles], component.work, component.span))
            return
        alone = len(component.tiles) == len(self.mask.tiles)
        inside = self.mask if alone else Mask("", self.mask.length, component.tiles)
        for (rows, keys), parts in needed_pairs(inside, self.layout.chunks).items():
            rank, home = self.layout.owner[rows], self.layout.owner[keys]
            self.pieces[rank][home].append(_work(home, [*parts], set()))

    def run(self) -> Iterator[Help]:
        """Move pieces until no rank is too far above the mean, or no move helps."""
        stuck = [0] * self.ranks
        while sum(stuck) < self.ranks:
            left = [-1 if off else load for off, load in zip(stuck, self.load, strict=True)]
            rank = left.index(max(left))
            if self.load[rank] <= self.mean * (1 + EVEN):
                break
            move = min(self._moves(rank), default=None)
            moved = self._take(rank, move) if move else None
            if move is None or moved is None:
                stuck[rank] = 1
            else:
                yield Help(moved.q, moved.kv, move.target)

    def _moves(self, rank: int) -> Iterator[_Move]:
        least = self.load.index(min(self.load))
        surplus, slack = self.load[rank] - self.mean, self.mean * EVEN / 2
        everywhere = ((home, *one) for home, row in self.pieces[rank].items() for one in enumerate(row))
        for home, at, piece in everywhere:
            is_first, is_last = at == 0, at == len(self.pieces[rank][home]) - 1
            for target in {least, home} | piece.helpers:
                wanted = min(surplus, self.mean - self.load[target])
                if target == rank or wanted <= 0:
                    continue
                if piece.area <= wanted + slack:
                    yield self._move(piece, (home, at), target, piece.q, is_first or is_last)
                elif len(piece.q) > 1:
                    first = self._round(piece.rows_of(wanted / piece.area), piece)
                    last = self._round(len(piece.q) - piece.rows_of(1 - wanted / piece.area), piece)
                    start = Span(piece.q.lo, piece.q.lo + first)
                    end = Span(piece.q.hi - last, piece.q.hi)
                    yield self._move(piece, (home, at), target, start, is_first)
                    yield self._move(piece, (home, at), target, end, is_last)

    def _round(self, rows: float, piece: _Work) -> int:
        """Return a number of whole tiles of rows, but some and not all."""
        return min(max(1, round(rows / self.aligned)) * self.aligned, len(piece.q) - 1)

    def _move(self, piece: _Work, place: tuple[int, int], target: int, rows: Span, is_at_end: bool) -> _Move:
        keys = 0 if target in piece.helpers or target == piece.home else len(piece.kv)
        taken = piece.area if rows is piece.q else piece.area_in(rows)
        cost = (4 * len(rows) + keys) * MOVED + (1 if is_at_end else 2) * LAUNCH
        return _Move(cost / max(1, taken), place, target, rows)

    def _take(self, rank: int, move: _Move) -> _Work | None:
        """Give rows of a piece away and return them, or None where that does not help."""
        (home, at), rows = move.place, move.rows
        piece = self.pieces[rank][home].pop(at)
        most = self.mean * (1 + EVEN) - self.load[move.target]
        while rows != piece.q and len(rows) > 2 * self.aligned and (area := piece.area_in(rows)) > most:
            few = max(1, int(len(rows) * most / area) // self.aligned) * self.aligned  # rows gain keys unevenly
            rows = Span(rows.lo, rows.lo + few) if rows.lo == piece.q.lo else Span(rows.hi - few, rows.hi)
        taken = piece.of_rows(rows)
        if taken is None or self.load[move.target] + taken.area >= self.load[rank]:
            return None
        self.load[rank] -= taken.area
        self.load[move.target] += taken.area
        piece.helpers.add(move.target)
        left = Span(rows.hi, piece.q.hi) if rows.lo == piece.q.lo else Span(piece.q.lo, rows.lo)
        if rest := piece.of_rows(left):
            self.pieces[rank][home].insert(at, rest)
        return taken
