"""Turn the tiles that one rank computes in one step into few kernel calls: fuse tiles, then pack them into segments.

The launches of each call are the kernel's choice (`dfa_megatron.kernels.launching`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dfa_megatron.plan.language.geometry import UNBOUNDED, Segment, Span, Tile
from dfa_megatron.plan.language.program import Launch
from dfa_megatron.plan.language.work import FAR, MOST_COPIES


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


def fuse(tiles: Sequence[Tile]) -> list[Tile]:
    """Fuse tiles whose union is one tile: all at once, else along rows and columns."""
    tiles = list(tiles)
    if len(tiles) > 1 and (one := union(tiles)):
        return [one]
    before = 0
    while len(tiles) > 1 and len(tiles) != before:
        before = len(tiles)
        tiles = _along(tiles, lambda tile: (tile.q.lo, tile.kv.lo))
        tiles = _along(tiles, lambda tile: (tile.kv.lo, tile.q.lo))
    return tiles


def _along(tiles: list[Tile], order: Callable[[Tile], Any]) -> list[Tile]:
    """Fuse each tile with the one before it, in this order, where the two make one tile."""
    out: list[Tile] = []
    for tile in sorted(tiles, key=order):
        if out and (one := _union_of_two(out[-1], tile)):
            out[-1] = one
        else:
            out.append(tile)
    return out


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


class Planned(NamedTuple):
    """What one kernel call computes: spans of rows, tiles in them, and the launches relative to the spans."""

    q: Span
    kv: Span
    tiles: tuple[Tile, ...]
    launches: tuple[Launch, ...]


Launching = Callable[[tuple[Tile, ...], bool], Sequence[Planned]]
"""Decide the kernel calls for tiles in rows of the same buffers, and the launches of each.

If asked, no tiles are fused or joined: each is a leaf of a fixed order.
"""

Divide = Callable[[Sequence[Segment], int, int], tuple[Launch, ...]]
"""Decide the launches of segments in so many rows of q and of kv."""

Piece = Sequence[Tile]
"""Tiles of the same query rows whose keys a kernel joins: all but the last are full."""


def rows_of(piece: Piece) -> Span:
    """Return the query rows of a piece."""
    return piece[-1].q


def in_packs(tiles: tuple[Tile, ...], apart: bool = False) -> list[Planned]:
    """Return few calls, each one launch of segments that have bands of their own: those of no kernel in particular."""
    return [planned(group, as_it_stands) for group in packs([[one] for one in (tiles if apart else fuse(tiles))])]


def planned(group: Sequence[Piece], divide: Divide) -> Planned:
    """Return the call of a group."""
    tiles = tuple(tile for piece in group for tile in piece)
    q, kv, segments = segments_of(tiles)
    return Planned(q, kv, tiles, divide(segments, len(q), len(kv)))


def as_it_stands(segments: Sequence[Segment], q_len: int, kv_len: int) -> tuple[Launch, ...]:
    """Return one launch of all segments."""
    return (Launch((Span(0, q_len),), (Span(0, kv_len),), tuple(segments)),)


def packs(pieces: Sequence[Piece], repeats: int = 0) -> list[list[Piece]]:
    """Group pieces so that one kernel call can compute each group: rows increase and are disjoint on both sides.

    Uses first fit in the order of rows, which makes few groups; tiles of consecutive documents make one.

    repeats: how many query heads have the same keys, for a kernel that copies keys: then only query rows need be
        disjoint, up to `MOST_COPIES`. Else 0.
    """
    if len(pieces) == 1:
        return [list(pieces)]
    out: list[list[Piece]] = []
    within_reach: list[list[Piece]] = []
    spare: dict[int, float] = {}  # by group: the keys that it may still copy
    for piece in sorted(pieces, key=lambda piece: (rows_of(piece).lo, piece[0].kv.lo)):
        rows = rows_of(piece)
        within_reach = [group for group in within_reach if rows.lo - rows_of(group[-1]).hi <= FAR]
        more = MOST_COPIES * repeats * len(rows) - sum(len(tile.kv) for tile in piece) if repeats else 0
        fitting = (one for one in within_reach if not repeats or spare[id(one)] + more >= 0)
        group = next((group for group in fitting if _follows(group[-1][-1], piece[0], repeats)), None)
        if group is None:
            group = []
            out.append(group)
            within_reach.append(group)
        group.append(piece)
        spare[id(group)] = spare.get(id(group), 0) + more
    return out


def _follows(before: Tile, after: Tile, repeats: int) -> bool:
    return before.q.hi <= after.q.lo and (repeats > 0 or 0 <= after.kv.lo - before.kv.hi <= FAR)


def segments_of(group: Sequence[Tile]) -> tuple[Span, Span, tuple[Segment, ...]]:
    """Return the spans of a group's rows, q and kv, and its segments relative to these spans."""
    q = Span(group[0].q.lo, group[-1].q.hi)
    kv = Span(min(tile.kv.lo for tile in group), max(tile.kv.hi for tile in group))
    segments = tuple(Segment(t.q.lo - q.lo, t.q.hi - q.lo, t.kv.lo - kv.lo, t.kv.hi - kv.lo, t.band) for t in group)
    return q, kv, segments
