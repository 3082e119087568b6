"""Plan the merges of a reduce whose order is fixed: a partial waits for its sibling in the tree."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span, joined_spans
from dfa_megatron.plan.language.ir import Block, Plan, Transfer, chunk_of
from dfa_megatron.plan.language.leaves import Grid, Keys, halves
from dfa_megatron.plan.language.program import BufferMerges, Destination, Region, RowsMerge, WriteMerge
from dfa_megatron.plan.lowering.merges import free_after_last_use


class Piece(NamedTuple):
    """Rows of a buffer for which a write brings a leaf."""

    lo: int
    hi: int
    key: int


class OrderedWrite(NamedTuple):
    """A write of an accumulator: its rows, whether the partial may be kept as it is, and its leaves by rows."""

    region: Region
    may_keep: bool
    pieces: Sequence[Piece]


def pieces_of(plan: Plan, grid: Grid, side: str, blocks: Sequence[Block], by: int) -> Iterator[Piece]:
    """Yield the leaves of blocks on one side, whose rows lie `by` after their tokens."""
    for block in blocks:
        other = block.kv_chunk if side == "q" else block.q_chunk
        for number, tile in enumerate(plan.tiles(block)):
            rows = tile.q if side == "q" else tile.kv
            yield Piece(rows.lo + by, rows.hi + by, grid.key(other, number))


def brought(plan: Plan) -> Mapping[Transfer, Sequence[Block]]:
    """Return the blocks whose sum each transfer of a result brings: those since the transfer before it."""
    sides = {name: side for side, name in plan.phase.writes}
    blocks: dict[tuple[int, str, int], list[Block]] = defaultdict(list)
    for block in sorted(plan.blocks):
        for side, name in plan.phase.writes:
            blocks[block.rank, name, chunk_of(block, side)].append(block)
    found: dict[Transfer, Sequence[Block]] = {}
    for transfer in sorted(plan.transfers):
        if transfer.what in sides:
            waiting = blocks[transfer.src, transfer.what, transfer.chunk]
            found[transfer] = [block for block in waiting if block.step < transfer.step]
            del waiting[: len(found[transfer])]
    return found


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
