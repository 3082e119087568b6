"""Turn the tiles that a rank computes in a step into few kernel calls, and each call into launches: plain data.

Tiles are fused, then packed into the segments of calls. A kernel says what one launch of it takes (`Takes`). Launches
are decided once, when an attention is prepared, and the checker reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from dfa_megatron.plan.language.geometry import UNBOUNDED, Band, Segment, Span, Tile, joined_spans
from dfa_megatron.plan.language.program import Launch, LaunchKind
from dfa_megatron.plan.language.work import FAR, GATHER, KEY, LAUNCH, MOST_COPIES, ROW, SLOWER, TILE


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


Piece = Sequence[Tile]
"""Tiles of the same query rows whose keys a kernel joins: all but the last are full."""


def rows_of(piece: Piece) -> Span:
    """Return the query rows of a piece."""
    return piece[-1].q


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

    def follows(before: Tile, after: Tile) -> bool:
        return before.q.hi <= after.q.lo and (repeats > 0 or 0 <= after.kv.lo - before.kv.hi <= FAR)

    for piece in sorted(pieces, key=lambda piece: (rows_of(piece).lo, piece[0].kv.lo)):
        rows = rows_of(piece)
        within_reach = [group for group in within_reach if rows.lo - rows_of(group[-1]).hi <= FAR]
        more = MOST_COPIES * repeats * len(rows) - sum(len(tile.kv) for tile in piece) if repeats else 0
        fitting = (one for one in within_reach if not repeats or spare[id(one)] + more >= 0)
        group = next((one for one in fitting if follows(one[-1][-1], piece[0])), None)
        if group is None:
            group = []
            out.append(group)
            within_reach.append(group)
        group.append(piece)
        spare[id(group)] = spare.get(id(group), 0) + more
    return out


Cut = Callable[[Tile], Iterable[Tile]]
"""Divide a tile without empty rows into tiles with disjoint rows whose bands a kernel can express."""


class Takes(NamedTuple):
    """What one launch of a kernel computes.

    kind: several segments only for a batch of one.
    cut: divides the tile of a single segment; None where a launch takes any band, blind rows included.
    skips: a launch passes over query rows between its segments, so these are not gathered.
    bands: it takes windows that are neither full nor square causal.
    repeats: how many query heads have the same keys, for a kernel that copies keys: several segments of a call may have
        the same, those of the same query rows are joined, and those of one window are one launch. Else 0.
    """

    kind: LaunchKind
    cut: Cut | None = None
    skips: bool = False
    bands: bool = True
    repeats: int = 0

    def divide(self, segments: Sequence[Segment], q_len: int, kv_len: int) -> tuple[Launch, ...]:
        """Return the launches of segments in so many rows; no query row is in two of them."""
        if len(segments) > 1 and self.kind == "segments":
            return (Launch((Span(0, q_len),), (Span(0, kv_len),), tuple(segments)),)
        if len(segments) > 1 and self.kind == "window":
            return by_window(segments, q_len, skips=self.skips)
        tiles = [segment.tile for segment in segments]
        if self.cut is not None:
            tiles = [part for tile in tiles if (shrunk := tile.shrink()) for part in self.cut(shrunk)]
        return tuple(Launch((t.q,), (t.kv,), (Segment(0, len(t.q), 0, len(t.kv), t.band),)) for t in tiles)


ANY = Takes("segments")
"""One launch computes a whole call: no kernel in particular."""


@lru_cache(maxsize=16)  # a forward and its backward ask for the same
def launches(takes: Takes, tiles: tuple[Tile, ...], apart: bool = False) -> tuple[Planned, ...]:
    """Return the kernel calls for tiles in rows of the same buffers, with the launches of each.

    apart: no tiles are fused or joined, because each is a leaf of a fixed order.
    """
    fused, repeats = ([*tiles], 0) if apart else (fuse(tiles), takes.repeats)
    if not takes.bands:
        fused = without_bands(fused, tiles)
    pieces = [[one] for one in fused]
    found = packs(pieces)
    if repeats and len(found) > 1:
        ways = found, packs(pieces, repeats), packs(joined(fused, repeats), repeats)
        found = min(ways, key=lambda groups: sum(_cost(one, repeats) for group in groups for one in _windows(group)))
    return tuple(_planned(group, takes) for group in found)


def _planned(group: Sequence[Piece], takes: Takes) -> Planned:
    tiles = tuple(tile for piece in group for tile in piece)
    q = Span(tiles[0].q.lo, tiles[-1].q.hi)
    kv = Span(min(tile.kv.lo for tile in tiles), max(tile.kv.hi for tile in tiles))
    segments = [Segment(t.q.lo - q.lo, t.q.hi - q.lo, t.kv.lo - kv.lo, t.kv.hi - kv.lo, t.band) for t in tiles]
    return Planned(q, kv, tiles, takes.divide(segments, len(q), len(kv)))


def without_bands(fused: Sequence[Tile], tiles: Sequence[Tile]) -> list[Tile]:
    """Return fused tiles, with those that became a band taken apart again into the tiles that they were fused from."""
    out: list[Tile] = []
    for one in fused:
        inside = [part for part in tiles if one.restrict(part.q, part.kv) == part]
        out += inside if one.form == "band" else [one]
    return out


def joined(tiles: Sequence[Tile], repeats: int) -> list[Piece]:
    """Join full tiles to the tiles of their query rows, such as a prompt to each of its answers, where it pays.

    The fewest rows come first, so a path is joined from its end. Rows of a full tile without other keys are a piece.
    """
    pieces: list[Piece] = []  # of disjoint rows, in their order
    apart: list[Piece] = []
    for tile in sorted(tiles, key=lambda tile: (tile.band.is_full, len(tile.q), tile.q.lo)):
        first = bisect_left(pieces, tile.q.lo, key=lambda piece: rows_of(piece).hi - 1)
        end = bisect_left(pieces, tile.q.hi, key=lambda piece: rows_of(piece).lo)
        inside, new, at = pieces[first:end], list[Piece](), tile.q.lo
        fits = tile.band.is_full and all(tile.q.holds(rows_of(piece)) and piece[-1].band.left < 0 for piece in inside)
        for rows, piece in [*((rows_of(piece), piece) for piece in inside if fits), (Span(tile.q.hi, tile.q.hi), [])]:
            if at < rows.lo:
                new.append([tile._replace(q=Span(at, rows.lo))])
            if piece:
                new.append([*sorted([*piece[:-1], tile._replace(q=rows)]), piece[-1]])
            at = rows.hi
        if inside and not (fits and _cost(new, repeats) < _cost(inside, repeats) + _cost([[tile]], repeats) - LAUNCH):
            apart.append([tile])
        else:
            pieces[first:end] = new
    return [*pieces, *apart]


def _cost(pieces: Sequence[Piece], repeats: int) -> float:
    """Return what the launch of pieces takes beside their pairs, in pairs."""
    tiles = [tile for piece in pieces for tile in piece]
    of_key = KEY + GATHER * any(before.kv.hi != tile.kv.lo for before, tile in pairwise(tiles))
    of_rows = sum((ROW + TILE / 2) * len(rows_of(piece)) for piece in pieces)
    in_vain: float = sum(-len(tile.q) % (TILE // 2) * len(tile.kv) for tile in tiles)
    in_vain += SLOWER * sum(tile.area for piece in pieces if not piece[-1].band.is_full for tile in piece[:-1])
    return LAUNCH + of_rows + in_vain + of_key * sum(len(tile.kv) for tile in tiles) / repeats


def _windows(group: list[Piece]) -> list[list[Piece]]:
    """Return the pieces of a group by the window that they need."""
    by_window = defaultdict(list)
    for piece in group:
        by_window[piece[-1].band].append(piece)
    return [*by_window.values()]


Joined = tuple[Segment, ...]
"""Parts of the same query rows: one segment of a launch, the keys of the full ones, then those of the last."""


def by_window(segments: Sequence[Segment], q_len: int, *, skips: bool) -> tuple[Launch, ...]:
    """Return as few varlen launches as the windows allow; rows that do not follow one another are gathered."""
    left = [tuple(same) for _, same in groupby(segments, key=lambda s: (s.q_lo, s.q_hi))]
    out = []
    # The most constrained windows first: they serve segments with fewer bounds.
    for window in sorted({same[-1].band for same in left}, key=lambda b: ((b.left < 0) + (b.right < 0), b)):
        if served := [same for same in left if _serves(window, same)]:
            out.append(_varlen(window, served, q_len if skips else None))
            left = [same for same in left if not _serves(window, same)]
    return tuple(out)


def _varlen(window: Band, served: Sequence[Joined], q_len: int | None) -> Launch:
    """Return the launch of segments that one window serves, in all rows of the call or, without `q_len`, in theirs."""
    q = [Span(same[0].q_lo, same[0].q_hi) for same in served]
    kv = [Span(s.kv_lo, s.kv_hi) for same in served for s in same]
    q_at = [span.lo for span in q] if q_len is not None else [*accumulate(map(len, q), initial=0)]
    kv_at = [*accumulate(map(_keys, served), initial=0)]
    segments = tuple(
        Segment(q_at[i], q_at[i] + len(q[i]), kv_at[i], kv_at[i + 1], same[-1].band) for i, same in enumerate(served)
    )
    rows = joined_spans(q) if q_len is None else [Span(0, q_len)]
    return Launch(tuple(rows), tuple(joined_spans(kv)), segments, window)


def _serves(window: Band, same: Joined) -> bool:
    """The window shows the same pairs of a segment as its own band: a bound that never binds may be added."""
    band, q_len, kv_len = same[-1].band, same[0].q_hi - same[0].q_lo, _keys(same)
    left = window.left == band.left or (band.left < 0 and window.left >= kv_len - 1)
    right = window.right == band.right or (band.right < 0 and window.right >= q_len - 1)
    return left and right


def _keys(same: Joined) -> int:
    return sum(s.kv_hi - s.kv_lo for s in same)
