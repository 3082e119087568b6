"""Turn the tiles that one rank computes in one step into few kernel calls: fuse tiles, then pack them into segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from dfa_megatron.plan.language.geometry import UNBOUNDED, Segment, Span, Tile
from dfa_megatron.plan.language.ir import Block

FusedTile = tuple[Tile, tuple[Block, ...]]

_FEW = 8
"""Up to this many tiles every pair is tried; beyond it, only neighbours."""


def union(tiles: Sequence[Tile]) -> Tile | None:
    """Return one tile equal to the disjoint union of these (shrunk) tiles, or None if there is none.

    A bound that binds in a shrunk tile is one of the union's, so there is one tile that may be it.
    """
    first, *others = tiles
    q_lo, q_hi, kv_lo, kv_hi, lo, hi = first.q.lo, first.q.hi, first.kv.lo, first.kv.hi, first.lo, first.hi
    for t in others:
        lo, hi = max(lo, t.lo), min(hi, t.hi)
        q_lo, q_hi = min(q_lo, t.q.lo), max(q_hi, t.q.hi)
        kv_lo, kv_hi = min(kv_lo, t.kv.lo), max(kv_hi, t.kv.hi)
    if any(t.lo not in (lo, -UNBOUNDED) or t.hi not in (hi, UNBOUNDED) for t in tiles):
        return None
    one = Tile(Span(q_lo, q_hi), Span(kv_lo, kv_hi), lo, hi).shrink()
    if one is None or one.area != sum(tile.area for tile in tiles):
        return None
    return one if all(one.restrict(tile.q, tile.kv) == tile for tile in tiles) else None


def fuse(tiles: Sequence[FusedTile]) -> list[FusedTile]:
    """Fuse tiles whose union is one tile: all at once, else along rows and columns, else pair by pair."""
    tiles = list(tiles)
    if len(tiles) > 1 and (one := union([tile for tile, _ in tiles])):
        return [(one, _blocks(tiles))]
    before = 0
    while len(tiles) > 1 and len(tiles) != before:
        before = len(tiles)
        tiles = _along(tiles, lambda fused: (fused[0].q.lo, fused[0].kv.lo))
        tiles = _along(tiles, lambda fused: (fused[0].kv.lo, fused[0].q.lo))
    return _pair_by_pair(tiles) if len(tiles) <= _FEW else tiles


def without_bands(fused: Sequence[FusedTile], tiles: Sequence[FusedTile]) -> list[FusedTile]:
    """Return fused tiles, with those that became a band taken apart again into the tiles that they were fused from."""
    out: list[FusedTile] = []
    for one in fused:
        inside = [part for part in tiles if one[0].restrict(part[0].q, part[0].kv) == part[0]]
        out += inside if one[0].form == "band" else [one]
    return out


def _along(tiles: list[FusedTile], order: Callable[[FusedTile], Any]) -> list[FusedTile]:
    """Fuse each tile with the one before it, in this order, where the two make one tile."""
    out: list[FusedTile] = []
    for fused in sorted(tiles, key=order):
        one = _union_of_two(out[-1][0], fused[0]) if out else None
        if one is None:
            out.append(fused)
        else:
            out[-1] = one, _blocks([out[-1], fused])
    return out


def _pair_by_pair(tiles: list[FusedTile]) -> list[FusedTile]:
    for second in range(len(tiles)):
        for first in range(second):
            if one := _union_of_two(tiles[first][0], tiles[second][0]):
                rest = [fused for at, fused in enumerate(tiles) if at not in (first, second)]
                return _pair_by_pair([*rest, (one, _blocks([tiles[first], tiles[second]]))])
    return tiles


def _union_of_two(one: Tile, other: Tile) -> Tile | None:
    """Return `union` with an early exit.

    Tiles that do not touch, or touch only at a corner like consecutive documents, cannot form one tile, unless there is
    only one pair per row.
    """
    if one.q.hi < other.q.lo or other.q.hi < one.q.lo or one.kv.hi < other.kv.lo or other.kv.hi < one.kv.lo:
        return None
    corner = (one.q.hi == other.q.lo or other.q.hi == one.q.lo) and (
        one.kv.hi == other.kv.lo or other.kv.hi == one.kv.lo
    )
    if corner and one.area > len(one.q):
        return None
    return union([one, other])


def _blocks(tiles: Sequence[FusedTile]) -> tuple[Block, ...]:
    return tuple(sorted({block for _, blocks in tiles for block in blocks}))


GAP = 2048
"""The largest gap in rows between two segments of one call. A larger gap costs more in merges than another call."""

COPIED = 2048
"""Rows that a kernel copies in the time of another call. Some copy the rows of a call with gaps to be adjacent."""

AGAIN, MOST_COPIES = 512, 3.0
"""The pairs for each copied key row from which on copies take less time than more calls, and the most copies of a call
for each of its query rows, as they take memory.
"""


class Launch(NamedTuple):
    """What one kernel call computes: spans of rows, the segments relative to them, their blocks and number of pairs."""

    q: Span
    kv: Span
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    area: int


@lru_cache(maxsize=16)  # a forward and its backward ask for the same
def launches(tiles: tuple[FusedTile, ...], bands: bool, repeats: bool) -> tuple[Launch, ...]:
    """Return the kernel calls for tiles in rows of the same buffers.

    Args:
        tiles: each with its block.
        bands: the kernel takes windows that are neither full nor square causal.
        repeats: several segments of a call may have the same keys, which the kernel copies for each; those of one
            window are one launch.
    """
    fused = fuse(tiles)
    if not bands:
        fused = without_bands(fused, tiles)
    apart = packs(fused)
    together = packs(fused, repeats=True) if repeats and len(apart) > 1 else apart
    return tuple(map(_launch, together if _worth(together, apart) else apart))


def _launch(group: Sequence[FusedTile]) -> Launch:
    blocks = {block for _, its in group for block in its}
    area = sum(tile.area for tile, _ in group)
    return Launch(*segments_of(group), tuple(sorted(blocks)), area)


def packs(tiles: Sequence[FusedTile], *, repeats: bool = False) -> list[list[FusedTile]]:
    """Group tiles so that one kernel call can compute each group: rows increase and are disjoint on both sides.

    Uses first fit in the order of rows, which makes few groups; tiles of consecutive documents make one.

    repeats: only query rows need be so, and the keys of a group are at most `MOST_COPIES` for each of them.
    """
    if len(tiles) == 1:
        return [list(tiles)]
    out: list[list[FusedTile]] = []
    within_reach: list[list[FusedTile]] = []
    spare: dict[int, float] = {}  # by group: the keys that it may still copy
    for fused in sorted(tiles, key=lambda fused: (fused[0].q.lo, fused[0].kv.lo)):
        within_reach = [group for group in within_reach if fused[0].q.lo - group[-1][0].q.hi <= GAP]
        more = MOST_COPIES * len(fused[0].q) - len(fused[0].kv) if repeats else 0
        fitting = (one for one in within_reach if not repeats or spare[id(one)] + more >= 0)
        group = next((group for group in fitting if _follows(group[-1][0], fused[0], repeats)), None)
        if group is None:
            group = []
            out.append(group)
            within_reach.append(group)
        group.append(fused)
        spare[id(group)] = spare.get(id(group), 0) + more
    return [part for group in out for part in _without_gaps(group)]


def _worth(together: list[list[FusedTile]], apart: list[list[FusedTile]]) -> bool:
    """Return whether fewer launches are worth the copies of keys that they need."""
    parts = [part for group in together for part in _windows(group)]
    if len(parts) >= sum(len(_windows(group)) for group in apart):
        return False
    copied = [tile for part in parts if any(b.kv.lo != a.kv.hi for a, b in pairwise(part)) for tile in part]
    return sum(tile.area for tile in copied) >= AGAIN * sum(len(tile.kv) for tile in copied)


def _windows(group: list[FusedTile]) -> list[list[Tile]]:
    """Return the tiles of a group by the window that they need."""
    by_window = defaultdict(list)
    for tile, _ in group:
        by_window[tile.band].append(tile)
    return [*by_window.values()]


def _without_gaps(group: list[FusedTile]) -> list[list[FusedTile]]:
    """Split a group at the gaps between its query rows, if more calls take less time than copies of its rows."""
    runs = [group[:1]]
    for before, fused in pairwise(group):
        if before[0].q.hi < fused[0].q.lo:
            runs.append([])
        runs[-1].append(fused)
    rows = sum(len(tile.q) for tile, _ in group)
    return runs if rows > COPIED * (len(runs) - 1) else [group]


def _follows(before: Tile, after: Tile, repeats: bool) -> bool:
    return before.q.hi <= after.q.lo and (repeats or 0 <= after.kv.lo - before.kv.hi <= GAP)


def segments_of(group: Sequence[FusedTile]) -> tuple[Span, Span, tuple[Segment, ...]]:
    """Return the spans of a group's rows, q and kv, and its segments relative to these spans."""
    q = Span(group[0][0].q.lo, group[-1][0].q.hi)
    kv = Span(min(tile.kv.lo for tile, _ in group), max(tile.kv.hi for tile, _ in group))
    segments = tuple(Segment(t.q.lo - q.lo, t.q.hi - q.lo, t.kv.lo - kv.lo, t.kv.hi - kv.lo, t.band) for t, _ in group)
    return q, kv, segments
