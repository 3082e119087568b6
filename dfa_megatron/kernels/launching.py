"""Decide a kernel's launches, once, when an attention is prepared: plain data, which the checker reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from dfa_megatron.plan.language.geometry import UNBOUNDED, Band, Segment, Span, Tile, joined_spans
from dfa_megatron.plan.language.program import Launch
from dfa_megatron.plan.language.work import GATHER, KEY, LAUNCH, ROW, SLOWER, TILE
from dfa_megatron.plan.lowering.kernel_calls import (
    Piece,
    Planned,
    as_it_stands,
    fuse,
    packs,
    planned,
    rows_of,
)

Cut = Callable[[Tile], Iterable[Tile]]
"""Divide a tile without empty rows into tiles with disjoint rows whose bands a kernel can express."""

LaunchKind = Literal["segment", "window", "segments"]
"""What one launch computes: one segment, several that share one window, or several of any bands."""


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
            return as_it_stands(segments, q_len, kv_len)
        if len(segments) > 1 and self.kind == "window":
            return by_window(segments, q_len, skips=self.skips)
        return tuple(launch for segment in segments for launch in self._of_one(segment))

    def _of_one(self, segment: Segment) -> Iterator[Launch]:
        if self.cut is None:
            yield _single(Span(segment.q_lo, segment.q_hi), Span(segment.kv_lo, segment.kv_hi), segment.band)
            return
        tile = segment.tile.shrink()
        for part in () if tile is None else self.cut(tile):
            yield _single(part.q, part.kv, part.band)


def _single(q: Span, kv: Span, band: Band) -> Launch:
    return Launch((q,), (kv,), (Segment(0, len(q), 0, len(kv), band),))


@lru_cache(maxsize=16)  # a forward and its backward ask for the same
def launches(takes: Takes, tiles: tuple[Tile, ...], apart: bool = False) -> tuple[Planned, ...]:
    """Return the kernel calls for tiles in rows of the same buffers, as a `Launching` does."""
    fused, repeats = ([*tiles], 0) if apart else (fuse(tiles), takes.repeats)
    if not takes.bands:
        fused = without_bands(fused, tiles)
    pieces = [[one] for one in fused]
    found = packs(pieces)
    if repeats and len(found) > 1:
        ways = found, packs(pieces, repeats), packs(joined(fused, repeats), repeats)
        found = min(ways, key=lambda groups: sum(_cost(one, repeats) for group in groups for one in _windows(group)))
    return tuple(planned(group, takes.divide) for group in found)


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


def uncut(tile: Tile) -> tuple[Tile, ...]:
    """Do not divide: for kernels that take any band in which every row sees a key, as in the shrunk tile given here."""
    return (tile,)


def cut_rows(tile: Tile, rows: int) -> Iterator[Tile]:
    """Cut into tiles of at most `rows` rows, each shrunk to the columns that its rows see."""
    for start in range(tile.q.lo, tile.q.hi, rows):
        cut = tile.restrict(Span(start, start + rows), tile.kv)
        assert cut is not None, "a shrunk tile has no empty row"
        yield cut


def cut_tall(whole: Tile) -> Iterator[Tile]:
    """Cut into at most three tiles, each of them full or with no more rows than columns.

    FlashAttention-2 ignores a right bound of kv_len or more, and adds a right bound of kv_len to a left bound that
    stands alone. Both change the result only if rows outnumber columns. The right bound hides pairs only in the first
    kv_len - 1 rows, the left bound only in the last kv_len - 1. So cut those rows off; the middle is full.
    """
    tile: Tile | None = whole
    while tile is not None:
        columns = len(tile.kv)
        if tile.band.is_full or len(tile.q) <= columns:
            yield tile
            return
        cut = tile.q.lo + columns if tile.hi != UNBOUNDED else tile.q.hi - columns  # tile.hi bounds j - i
        head = tile.restrict(Span(tile.q.lo, cut), tile.kv)
        assert head is not None, "a shrunk tile has no empty row"
        yield head
        tile = tile.restrict(Span(cut, tile.q.hi), tile.kv)
