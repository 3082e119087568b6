"""Turn the tiles that one rank computes in one step into few kernel calls: fuse tiles, then pack them into segments."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from dfa_megatron.plan.language.geometry import UNBOUNDED, Segment, Span, Tile
from dfa_megatron.plan.language.ir import Block
from dfa_megatron.plan.language.sizes import GATHER, KEY, LAUNCH, ROW

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

SLOWER = 1 / 12
"""How much longer a causal launch takes for the pairs of a full tile than a full one, whose tiles are larger."""

TILE = 64
"""Query rows that a kernel computes together; each sees half a tile of keys, of 128, in vain."""

MOST_COPIES = 0.75
"""The most keys that the segments of a call have together, with their heads, in query rows, as copies take memory."""


class Launch(NamedTuple):
    """What one kernel call computes: spans of rows, the segments relative to them, their blocks and number of pairs."""

    q: Span
    kv: Span
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    area: int


Piece = list[FusedTile]
"""Tiles of the same query rows whose keys a kernel joins: all but the last are full."""


@lru_cache(maxsize=16)  # a forward and its backward ask for the same
def launches(tiles: tuple[FusedTile, ...], bands: bool, repeats: int, apart: bool = False) -> tuple[Launch, ...]:
    """Return the kernel calls for tiles in rows of the same buffers.

    Args:
        tiles: each with its block.
        bands: the kernel takes windows that are neither full nor square causal.
        repeats: how many query heads have the same keys, for a kernel that copies keys: several segments of a call may
            have the same, those of the same query rows are joined, and those of one window are one launch. Else 0.
        apart: no two tiles are fused: each is a leaf of a fixed order.
    """
    fused = [*tiles] if apart else fuse(tiles)
    if not bands:
        fused = without_bands(fused, tiles)
    pieces = [[one] for one in fused]
    found = packs(pieces)
    if repeats and len(found) > 1:
        ways = found, packs(pieces, repeats), packs(joined(fused, repeats), repeats)
        found = min(ways, key=lambda groups: sum(_cost(one, repeats) for group in groups for one in _windows(group)))
    return tuple(map(_launch, found))


def _launch(group: Sequence[Piece]) -> Launch:
    tiles = [one for piece in group for one in piece]
    blocks = {block for _, its in tiles for block in its}
    return Launch(*segments_of(tiles), tuple(sorted(blocks)), sum(tile.area for tile, _ in tiles))


def joined(tiles: Sequence[FusedTile], repeats: int) -> list[Piece]:
    """Join full tiles to the tiles of their query rows, such as a prompt to each of its answers, where it pays.

    The fewest rows come first, so a path is joined from its end. Rows of a full tile without other keys are a piece.
    """
    pieces: list[Piece] = []  # of disjoint rows, in their order
    apart: list[Piece] = []
    for tile, blocks in sorted(tiles, key=lambda fused: (fused[0].band.is_full, len(fused[0].q), fused[0].q.lo)):
        first = bisect_left(pieces, tile.q.lo, key=lambda piece: _rows(piece).hi - 1)
        end = bisect_left(pieces, tile.q.hi, key=lambda piece: _rows(piece).lo)
        inside, new, at = pieces[first:end], list[Piece](), tile.q.lo
        fits = tile.band.is_full and all(tile.q.holds(_rows(piece)) and piece[-1][0].band.left < 0 for piece in inside)
        for rows, piece in [*((_rows(piece), piece) for piece in inside if fits), (Span(tile.q.hi, tile.q.hi), [])]:
            if at < rows.lo:
                new.append([(tile._replace(q=Span(at, rows.lo)), blocks)])
            if piece:
                new.append([*sorted([*piece[:-1], (tile._replace(q=rows), blocks)]), piece[-1]])
            at = rows.hi
        if inside and not (
            fits and _cost(new, repeats) < _cost(inside, repeats) + _cost([[(tile, blocks)]], repeats) - LAUNCH
        ):
            apart.append([(tile, blocks)])
        else:
            pieces[first:end] = new
    return [*pieces, *apart]


def _rows(piece: Piece) -> Span:
    return piece[-1][0].q


def packs(pieces: Sequence[Piece], repeats: int = 0) -> list[list[Piece]]:
    """Group pieces so that one kernel call can compute each group: rows increase and are disjoint on both sides.

    Uses first fit in the order of rows, which makes few groups; tiles of consecutive documents make one.

    repeats: as for `launches`. With it only query rows need be disjoint, up to `MOST_COPIES`.
    """
    if len(pieces) == 1:
        return [list(pieces)]
    out: list[list[Piece]] = []
    within_reach: list[list[Piece]] = []
    spare: dict[int, float] = {}  # by group: the keys that it may still copy
    for piece in sorted(pieces, key=lambda piece: (_rows(piece).lo, piece[0][0].kv.lo)):
        rows = _rows(piece)
        within_reach = [group for group in within_reach if rows.lo - _rows(group[-1]).hi <= GAP]
        more = MOST_COPIES * repeats * len(rows) - sum(len(tile.kv) for tile, _ in piece) if repeats else 0
        fitting = (one for one in within_reach if not repeats or spare[id(one)] + more >= 0)
        group = next((group for group in fitting if _follows(group[-1][-1][0], piece[0][0], repeats)), None)
        if group is None:
            group = []
            out.append(group)
            within_reach.append(group)
        group.append(piece)
        spare[id(group)] = spare.get(id(group), 0) + more
    return [part for group in out for part in _without_gaps(group)]


def _cost(pieces: Sequence[Piece], repeats: int) -> float:
    """Return what the launch of pieces takes beside their pairs, in pairs."""
    tiles = [tile for piece in pieces for tile, _ in piece]
    of_key = KEY + GATHER * any(before.kv.hi != tile.kv.lo for before, tile in pairwise(tiles))
    of_rows = sum((ROW + TILE) * len(_rows(piece)) for piece in pieces)
    in_vain: float = sum(-len(tile.q) % TILE * len(tile.kv) for tile in tiles)
    in_vain += SLOWER * sum(tile.area for piece in pieces if not piece[-1][0].band.is_full for tile, _ in piece[:-1])
    return LAUNCH + of_rows + in_vain + of_key * sum(len(tile.kv) for tile in tiles) / repeats


def _windows(group: list[Piece]) -> list[list[Piece]]:
    """Return the pieces of a group by the window that they need."""
    by_window = defaultdict(list)
    for piece in group:
        by_window[piece[-1][0].band].append(piece)
    return [*by_window.values()]


def _without_gaps(group: list[Piece]) -> list[list[Piece]]:
    """Split a group at the gaps between its query rows, if more calls take less time than copies of its rows."""
    runs = [group[:1]]
    for before, piece in pairwise(group):
        if _rows(before).hi < _rows(piece).lo:
            runs.append([])
        runs[-1].append(piece)
    rows = sum(len(_rows(piece)) for piece in group)
    return runs if rows > COPIED * (len(runs) - 1) else [group]


def _follows(before: Tile, after: Tile, repeats: int) -> bool:
    return before.q.hi <= after.q.lo and (repeats > 0 or 0 <= after.kv.lo - before.kv.hi <= GAP)


def segments_of(group: Sequence[FusedTile]) -> tuple[Span, Span, tuple[Segment, ...]]:
    """Return the spans of a group's rows, q and kv, and its segments relative to these spans."""
    q = Span(group[0][0].q.lo, group[-1][0].q.hi)
    kv = Span(min(tile.kv.lo for tile, _ in group), max(tile.kv.hi for tile, _ in group))
    segments = tuple(Segment(t.q.lo - q.lo, t.q.hi - q.lo, t.kv.lo - kv.lo, t.kv.hi - kv.lo, t.band) for t, _ in group)
    return q, kv, segments
