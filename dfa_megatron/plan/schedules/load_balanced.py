"""Distribute tokens by work: every rank holds equal tokens and equal work; short documents stay on one rank.

Tokens that attend to one another form a *component* of the mask: a document, or the whole sequence. Components are
placed whole, the heaviest first, each on the rank with the least work that has room. A component that is too heavy, or
fits nowhere, is cut. Its rows are sorted by work per row; each rank takes a few light ones and a few heavy ones, so
that both sums match. This turns one causal sequence into zigzag.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.layout import cut as cut_evenly
from dfa_megatron.plan.language.mask import Component, Mask, components, kept_on_mask
from dfa_megatron.plan.language.work import CUTS, EVEN, MOVED, ROW, TILE, WHOLE


@kept_on_mask
def load_balanced(mask: Mask, ranks: int) -> Layout:
    """Return chunks that give every rank equal tokens and nearly equal work. Equal arguments give equal layouts.

    If the length does not divide, the first ranks hold one token more.
    """
    parts = components(mask)
    even = sum(part.work for part in parts) / ranks
    usual, finer, *coarser = WHOLE
    best = _Balancing(parts, mask.length, ranks, even, usual * even)
    if max(best.load) > (1 + EVEN) * even:
        best = min(best, _Balancing(parts, mask.length, ranks, even, finer * even), key=lambda one: max(one.load))
    elif MOVED * max(best.received) > max(best.load):
        others = (_Balancing(parts, mask.length, ranks, even, share * even) for share in coarser)
        best = min(best, *others, key=_Balancing.cost)
    chunks = sorted((lo, hi, rank) for rank, held in enumerate(best.held) for lo, hi in _joined(held))
    return Layout(tuple(Span(lo, hi) for lo, hi, _ in chunks), tuple(rank for _, _, rank in chunks), ranks)


def dealt(work: Sequence[int], owners: Sequence[int], ranks: int, order: Iterable[int]) -> list[int]:
    """Return the owners of pieces, after ranks with much work have given some to those with little.

    A rank keeps its pieces in this order, those that fit into an even share of the work. The others go, the heaviest
    first, to the rank with the least work.
    """
    found, loads, given, share = [*owners], [0] * ranks, list[int](), sum(work) / ranks
    for piece in order:
        if loads[found[piece]] + work[piece] <= share:
            loads[found[piece]] += work[piece]
        else:
            given.append(piece)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for piece in sorted(given, key=lambda piece: (-work[piece], piece)):
        load, found[piece] = heap[0]
        heapq.heapreplace(heap, (load + work[piece], found[piece]))
    return found


class _Balancing:
    """One distribution of the tokens: each rank's spans, its work, and the number of keys it has to receive.

    held: (first token, end, -1 for whole components or the first token of the cut component) by rank. room: tokens
    that a rank still takes.
    """

    def __init__(self, parts: Sequence[Component], length: int, ranks: int, even: float, limit: float) -> None:
        self.ranks, self.even = ranks, even
        self.room = [len(part) for part in cut_evenly(length, ranks)]
        self.load, self.received = [0.0] * ranks, [0] * ranks
        self.held: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        if cut := self._place_whole(parts, limit):
            self._balance_rows(cut)

    def cost(self) -> float:
        """Return what the slowest rank takes if messages travel behind compute; each span ends with half a tile."""
        each = zip(self.load, self.received, self.held, strict=True)
        return max(max(load, MOVED * received) + ROW * TILE / 2 * len(held) for load, received, held in each)

    def _place_whole(self, parts: Sequence[Component], limit: float) -> list[Component]:
        """Place components on ranks, the heaviest first; return those that have to be cut."""
        cut: list[Component] = []
        most = max(limit, self.even * (1 + EVEN / 2))
        heap = [(0.0, rank) for rank in range(self.ranks)]
        load, room, held = self.load, self.room, self.held
        for part in sorted(parts, key=lambda part: part.work, reverse=True):
            lo, hi, work = part.span.lo, part.span.hi, part.work
            full: list[tuple[float, int]] = []
            if work <= limit:
                while heap and room[heap[0][1]] < hi - lo:
                    full.append(heapq.heappop(heap))
            if work > limit or not heap or heap[0][0] + work > most:
                cut.append(part)
            else:
                rank = heap[0][1]
                load[rank] += work
                room[rank] -= hi - lo
                held[rank].append((lo, hi, -1))
                heapq.heapreplace(heap, (load[rank], rank))
            for entry in full:
                if room[entry[1]]:
                    heapq.heappush(heap, entry)
        return cut

    def _balance_rows(self, cut: Sequence[Component]) -> None:
        """Fill every rank to the token, with even work if the rows allow; ranks far from the mean choose first."""
        rows = _RowsOf(cut, max(1, sum(self.room) // (CUTS * self.ranks)))
        mean = rows.work[-1] / rows.tokens[-1]
        waiting = [rank for rank, room in enumerate(self.room) if room]
        waiting.sort(key=lambda rank: -abs(self.even - self.load[rank] - mean * self.room[rank]))
        for rank in waiting:
            taken, work = rows.take(self.room[rank], self.even - self.load[rank])
            self.load[rank] += work
            self.room[rank] = 0
            self.held[rank] += [(lo, hi, part.span.lo) for lo, hi, part in taken]
            self.received[rank] += _keys(taken)


def _keys(taken: Iterable[tuple[int, int, Component]]) -> int:
    """Return the number of tokens whose keys these rows need beside their own."""
    until: dict[int, int] = {}
    own = 0
    for lo, hi, part in taken:
        start, end = part.span.lo, hi if part.is_document else part.span.hi
        until[start] = max(until.get(start, 0), end)
        own += hi - lo
    return sum(end - start for start, end in until.items()) - own


class _RowsOf:
    """The rows of some components as segments in order of the work per row; ranks take from both ends.

    tokens, work: of all segments before each, and of all.
    """

    def __init__(self, parts: Sequence[Component], segment: int) -> None:
        found: list[tuple[float, int, int, float, Component]] = []
        for part in parts:
            first, length = part.span.lo, len(part.span)
            count = -(-length // segment)
            edges = [first + at * length // count for at in range(count + 1)]
            if len(part.tiles) > 1:  # rows of one tile are alike
                edges = sorted({*edges, *(edge for tile in part.tiles for edge in (tile.q.lo, tile.q.hi))})
            for (lo, hi), work in zip(pairwise(edges), part.row_work(edges), strict=True):
                found.append((work / (hi - lo), lo, hi, work, part))
        self.segments = sorted(found, key=lambda segment: segment[:2])
        self.tokens = [*accumulate((hi - lo for _, lo, hi, _, _ in self.segments), initial=0)]
        self.work = [*accumulate((work for *_, work, _ in self.segments), initial=0.0)]
        self.low, self.high = 0, self.tokens[-1]

    def take(self, tokens: int, work: float) -> tuple[list[tuple[int, int, Component]], float]:
        """Take `tokens` rows of about `work`; return (spans of rows with their components, their work)."""
        light, got = self._split(tokens, work)
        first, last = self.low + light, self.high - (tokens - light)
        taken = [*self._spans(self.low, first), *self._spans(last, self.high)]
        self.low, self.high = first, last
        return taken, got

    def _split(self, tokens: int, work: float) -> tuple[int, float]:
        """Return (number of rows to take from the light end, work of all rows taken).

        The more rows come from the light end, the less the work.
        """
        outside = self._until(self.high) - self._until(self.low)

        def got(light: int) -> float:
            return outside + self._until(self.low + light) - self._until(self.high - tokens + light)

        light = bisect_left(range(tokens), -work, key=lambda light: -got(light))
        if light and got(light - 1) - work < work - got(light):
            light -= 1
        return light, got(light)

    def _until(self, row: int) -> float:
        """Return the work of the first `row` rows."""
        at = bisect_right(self.tokens, row, hi=len(self.tokens) - 1) - 1
        return self.work[at] + (row - self.tokens[at]) * self.segments[at][0]

    def _spans(self, first: int, last: int) -> Iterable[tuple[int, int, Component]]:
        at = bisect_right(self.tokens, first) - 1
        while first < last:
            _, lo, hi, _, part = self.segments[at]
            start = lo + first - self.tokens[at]
            end = min(hi, start + last - first)
            yield start, end, part
            first += end - start
            at += 1


def _joined(held: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans into as few chunks as possible.

    Spans of a cut component merge only with each other, because a chunk is the unit that is sent.
    """
    out: list[tuple[int, int, int]] = []
    for lo, hi, whose in sorted(held):
        if out and out[-1][1] == lo and out[-1][2] == whose:
            lo = out.pop()[0]
        out.append((lo, hi, whose))
    return [(lo, hi) for lo, hi, _ in out]
