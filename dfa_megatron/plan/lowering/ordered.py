"""Plan the merges of a reduce whose order is fixed: a partial waits for its sibling in the tree."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span, Tile, joined_spans
from dfa_megatron.plan.language.ir import Block, Plan, Transfer
from dfa_megatron.plan.language.leaves import Grid, Keys, halves
from dfa_megatron.plan.language.program import BufferMerges, Call, Destination, Region, RowsMerge, WriteMerge
from dfa_megatron.plan.lowering.lower import free_after_last_use
from dfa_megatron.plan.lowering.messages import carried_by


class LeafRows(NamedTuple):
    """Rows of a buffer for which a write brings a leaf."""

    lo: int
    hi: int
    key: int


class OrderedWrite(NamedTuple):
    """A write of an accumulator: its rows, whether the partial may be kept as it is, and its leaves by rows."""

    region: Region
    may_keep: bool
    pieces: Sequence[LeafRows]


class OrderedWrites:
    """The same as `AccumulatorWrites`, for merges in the order of a tree."""

    apart = True

    def __init__(self, plan: Plan, rank: int, grid: Grid) -> None:
        self.plan, self.rank, self.grid = plan, rank, grid
        self._side_of = {name: side for side, name in plan.phase.writes}
        self._carried, _ = carried_by(plan)
        self._writes: dict[int, list[OrderedWrite]] = defaultdict(list)
        self._leaves: dict[tuple[int, int, Tile], tuple[int, int]] = {}

    def placed(self, q_buffer: int, kv_buffer: int, tile: Tile, block: Block, number: int) -> None:
        """Note where a leaf of a step lies in the buffers that it is computed from."""
        keys = self.grid.key(block.kv_chunk, number), self.grid.key(block.q_chunk, number)
        self._leaves[q_buffer, kv_buffer, tile] = keys

    def computed(self, call: Call, tiles: Sequence[Tile]) -> None:
        """Note what a call writes for these tiles."""
        for at, (write, read) in enumerate(zip(call.writes, (call.q, call.kv), strict=False)):
            by, pieces = write.lo - read.lo, []
            for tile in tiles:
                rows = tile.kv if at else tile.q
                pieces.append(
                    LeafRows(rows.lo + by, rows.hi + by, self._leaves[call.q.buffer, call.kv.buffer, tile][at])
                )
            self._writes[write.buffer].append(OrderedWrite(write, True, pieces))

    def landed(self, step: int, peer: int, chunk: int, into: Region) -> None:
        """Note what a chunk of a message brings."""
        by, by_q = into.lo - self.plan.layout.chunks[chunk].lo, self._side_of[into.name] == "q"
        pieces = list[LeafRows]()
        for block in self._carried[Transfer(step, peer, self.rank, into.name, chunk)]:
            for number, tile in enumerate(self.plan.tiles(block)):
                rows, other = (tile.q, block.kv_chunk) if by_q else (tile.kv, block.q_chunk)
                pieces.append(LeafRows(rows.lo + by, rows.hi + by, self.grid.key(other, number)))
        self._writes[into.buffer].append(OrderedWrite(into, False, pieces))

    def merges(self, rows: Mapping[int, int]) -> dict[int, BufferMerges]:
        """Plan the merges of every accumulator, given as buffer -> its rows."""
        return {buffer: merges_in_order(count, self._writes[buffer]) for buffer, count in rows.items()}


def merges_in_order(rows: int, writes: Sequence[OrderedWrite]) -> BufferMerges:
    """Plan one accumulator of so many rows.

    Raises:
        PlanError: a write brings leaves that are no node of the tree.
    """
    edges = sorted({0, rows, *(edge for write in writes for piece in write.pieces for edge in piece[:2])})
    brings: list[dict[int, list[int]]] = [defaultdict(list) for _ in edges[1:]]
    for number, write in enumerate(writes):
        for lo, hi, key in write.pieces:
            for run in range(bisect_left(edges, lo), bisect_left(edges, hi)):
                brings[run][number].append(key)
    merges: dict[int, list[RowsMerge]] = defaultdict(list)
    empty: list[Span] = []
    for (lo, hi), by_write in zip(pairwise(edges), brings, strict=True):
        if not by_write:
            empty.append(Span(lo, hi))
            continue
        for number, saved, first, into in _folds({tuple(sorted(keys)): at for at, keys in by_write.items()}):
            before = merges[number][-1] if merges[number] else None
            if before and (before.hi, before.saved, before.first, before.into) == (lo, saved, first, into):
                lo_of, skip = before.lo, before.skip
                merges[number].pop()
            else:
                lo_of, skip = lo, lo - writes[number].region.lo
            merges[number].append(RowsMerge(lo_of, hi, skip, saved, False, into, first=first))
    free_after_last_use(merges)
    alone = len(writes) == 1 and writes[0].may_keep and (writes[0].region.lo, writes[0].region.hi) == (0, rows)
    mergings = (WriteMerge(tuple(merges[at]), alone, write.may_keep) for at, write in enumerate(writes))
    return BufferMerges(tuple(mergings), tuple(joined_spans(empty)), Span(0, 0), ordered=True)


def _folds(units: Mapping[Keys, int]) -> Iterator[tuple[int, tuple[int, ...], tuple[bool, ...], Destination]]:
    """Yield (write, saved writes that it merges with one by one, whether each goes first, destination) of some rows.

    units: the leaves that each write brings.
    """
    root = tuple(sorted(key for keys in units for key in keys))
    above: dict[
        Keys, tuple[Keys, Keys, bool]
    ] = {}  # node -> its sibling, the node of both, whether the sibling is first
    below = [root]
    while below:
        if (node := below.pop()) not in units:
            if len(node) == 1:
                raise PlanError("a partial of a fixed order is no node of the tree")
            one, other = halves(node)
            above |= {one: (other, node, False), other: (one, node, True)}
            below += one, other
    waiting: dict[Keys, int] = {}
    for node, number in sorted(units.items(), key=lambda unit: unit[1]):
        saved, first = list[int](), list[bool]()
        while node != root and above[node][0] in waiting:
            sibling, node, goes_first = above[node]
            saved.append(waiting.pop(sibling))
            first.append(goes_first)
        waiting[node] = number
        yield number, tuple(saved), tuple(first), Destination.RESULT if node == root else Destination.SAVED
