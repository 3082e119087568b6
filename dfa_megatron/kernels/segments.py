"""The attentions of one call, and how a call is divided into parts that a kernel can launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal

import torch

from dfa_megatron.kernels.current_stream import stream_of
from dfa_megatron.kernels.tape import unrecorded
from dfa_megatron.plan.language.geometry import UNBOUNDED, Band, Segment, Span, Tile

Takes = Literal["segment", "window", "segments"]
"""What one launch of a kernel computes: one segment, several that share one window, or several of any bands."""

Joined = tuple[Segment, ...]
"""Parts of the same query rows: one segment of a launch."""

Cut = Callable[[Tile], Iterable[Tile]]
"""Divide a tile without empty rows into tiles with disjoint rows whose bands a kernel can express."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of one call over q_len x kv_len rows.

    There is one object per call, so derived tables are cached on it.

    parts: rows increase on both sides and are disjoint. For a kernel of windows several may have the same keys, and
        parts of the same query rows are one segment of a launch: the keys of the full ones, then those of the last.
    window: set for a varlen launch, whose segments follow one another: the one window that serves all of them.
    ragged: calls of many other lengths come, so a kernel had better not be compiled for these.
    tables: cache of everything derived; each user chooses its keys.
    """

    parts: tuple[Segment, ...]
    q_len: int
    kv_len: int
    window: Band | None = None
    ragged: bool = False
    tables: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def one(cls, band: Band, q_len: int, kv_len: int, *, ragged: bool = False) -> Segments:
        """A single segment of all rows."""
        return cls((Segment(0, q_len, 0, kv_len, band),), q_len, kv_len, ragged=ragged)

    @cached_property
    def band(self) -> Band:
        """The band of a single segment, or the window of a varlen launch."""
        if self.window is not None:
            return self.window
        (only,) = self.parts
        return only.band

    @cached_property
    def max_q(self) -> int:
        """The most query rows of a segment."""
        return max(s.q_hi - s.q_lo for s in self.parts)

    @cached_property
    def max_kv(self) -> int:
        """The most key rows of a segment."""
        return max(s.kv_hi - s.kv_lo for s in self.parts)

    @cached_property
    def is_whole(self) -> bool:
        """No query row and no key row is between segments."""
        q, kv = sum(s.q_hi - s.q_lo for s in self.parts), sum(s.kv_hi - s.kv_lo for s in self.parts)
        return q == self.q_len and kv == self.kv_len

    @cached_property
    def q_covered(self) -> int:
        """The query rows in segments."""
        return sum(s.q_hi - s.q_lo for s in self.parts)

    @property
    def has_gaps(self) -> bool:
        """A query row is between segments."""
        return self.q_covered < self.q_len

    def offsets(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return int32 (segments + 1,) offsets into the query rows and into the key rows of a varlen launch.

        The third is the number of query rows of each segment, where there are gaps between them.
        """
        key = "offsets", device, stream_of(device)
        if key not in self.tables:
            lengths = [s.q_hi - s.q_lo for s in self.parts], [s.kv_hi - s.kv_lo for s in self.parts]
            starts, ends = (list(accumulate(x, initial=0)) for x in lengths)
            if self.has_gaps:
                starts = [*(s.q_lo for s in self.parts), self.q_len]
            used = moved(lengths[0], torch.int32, device) if self.has_gaps else None
            self.tables[key] = *(moved(x, torch.int32, device) for x in (starts, ends)), used
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = self.tables[key]
        return found

    def groups(self, *, skips: bool) -> tuple[Part, ...]:
        """As few varlen launches as the windows allow; rows that do not follow one another are gathered.

        skips: a launch passes over query rows between its segments, so these are not gathered.
        """
        left = [tuple(same) for _, same in groupby(self.parts, key=lambda s: (s.q_lo, s.q_hi))]
        out = []
        # The most constrained windows first: they serve segments with fewer bounds.
        for window in sorted({same[-1].band for same in left}, key=lambda b: ((b.left < 0) + (b.right < 0), b)):
            if served := [same for same in left if _serves(window, same)]:
                out.append(_group(self, window, served, skips=skips))
                left = [same for same in left if not _serves(window, same)]
        return tuple(out)

    def split(self, takes: Takes, cut: Cut | None, *, single: bool, skips: bool) -> Split:
        """Return the launches of a kernel: one segment each, or several where the kernel takes them.

        takes: the segments of one launch.
        cut: divides the tile of a single segment; None where a launch takes any band, blind rows included.
        single: the batch is one. A launch of several segments has no batch dimension.
        skips: as for `groups`.
        """
        if len(self.parts) > 1 and single and takes != "segment":
            whole = Part(Rows(0, self.q_len, self.q_len), Rows(0, self.kv_len, self.kv_len), self)
            return Split.of(self, (whole,) if takes == "segments" else self.groups(skips=skips))
        return Split.of(self, tuple(part for s in self.parts for part in _tiles(self, s, cut)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a tensor with `length` of them: lo..hi, or those of `spans`, in their order, where these have gaps.

    A key row is in several spans where several segments of a launch have it.
    """

    lo: int
    hi: int
    length: int
    spans: tuple[Span, ...] | None = None
    _on: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def every(self) -> tuple[Span, ...]:
        """The spans, one where there are no gaps."""
        return self.spans or (Span(self.lo, self.hi),)

    @cached_property
    def count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.every))

    @cached_property
    def is_all(self) -> bool:
        """These are all rows of the tensor."""
        return self.spans is None and self.count == self.length

    def take(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return these rows of x: a view, or a copy where they have gaps."""
        if self.is_all:
            return x
        if self.spans is None:
            return x.narrow(dim, self.lo, self.count)
        return x.index_select(dim, self.indices(x.device))

    def put(self, x: torch.Tensor, value: torch.Tensor, dim: int = 1, *, add: bool = False) -> None:
        """Write these rows of x, or add to them."""
        if self.spans is not None:
            x.index_copy_(dim, self.indices(x.device), value.to(x.dtype))
        elif add:
            x.narrow(dim, self.lo, self.count).add_(value)
        else:
            x.narrow(dim, self.lo, self.count).copy_(value)

    def indices(self, device: torch.device) -> torch.Tensor:
        """Return the rows, int64 (count,)."""
        key = device, stream_of(device)
        if key not in self._on:
            self._on[key] = moved(self._rows(), torch.int64, device)
        return self._on[key]

    def sources(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where in `indices` each row stands: int32 (length + 1,) offsets into the int32 places."""
        keys = ("starts", device, stream_of(device)), ("places", device, stream_of(device))
        if keys[0] not in self._on:
            with unrecorded():
                rows = self._rows()
                starts = torch.nn.functional.pad(rows.bincount(minlength=self.length).cumsum(0), (1, 0))
                places = rows.argsort(stable=True)
            for key, values in zip(keys, (starts, places), strict=True):
                self._on[key] = moved(values, torch.int32, device)
        return self._on[keys[0]], self._on[keys[1]]

    def _rows(self) -> torch.Tensor:
        with unrecorded():
            return torch.cat([torch.arange(span.lo, span.hi, device="cpu") for span in self.every])


@dataclass(frozen=True, eq=False)
class Part:
    """One launch of a call: its rows, and their segments in the launch's own row numbers.

    segments: the call's own object where the launch is the call as it stands.
    """

    rows: Rows
    columns: Rows
    segments: Segments

    @cached_property
    def is_whole(self) -> bool:
        """The launch has all rows of the call."""
        return self.rows.is_all and self.columns.is_all


@dataclass(frozen=True, eq=False)
class Split:
    """The launches of a call; no query row is in two of them.

    only: the launch, where one has every query row.
    fills_rows, fills_columns: every query row, every key row is in a launch.
    shares_columns: a key row may be in several segments, so gradients of keys and values are summed.
    copies: the key rows of all launches, one after another, where these are varlen launches with keys in common.
    """

    parts: tuple[Part, ...]
    only: Part | None
    fills_rows: bool
    fills_columns: bool
    shares_columns: bool
    copies: Rows | None

    @classmethod
    def of(cls, segments: Segments, parts: tuple[Part, ...]) -> Split:
        """Find out what the launches cover."""
        covered = sum(p.rows.count if p.segments.window is None else p.segments.q_covered for p in parts)
        fills_rows = covered == segments.q_len
        alone = len(parts) == 1 and parts[0].rows.is_all
        only = parts[0] if alone and (fills_rows or parts[0].segments.window is None) else None
        spans = [span for p in parts for span in p.columns.every]
        shares = any(before.hi > after.lo for before, after in pairwise(sorted(spans)))
        columns, whole = sum(p.columns.count for p in parts), segments.kv_len
        varlen = shares and all(p.segments.window is not None for p in parts)
        copies = Rows(0, whole, whole, tuple(spans)) if varlen else None
        return cls(parts, only, fills_rows, columns == whole and not shares, shares, copies)


def _tiles(whole: Segments, segment: Segment, cut: Cut | None) -> Iterable[Part]:
    """Yield the launches of one segment."""
    if cut is None:
        yield _part(whole, Span(segment.q_lo, segment.q_hi), Span(segment.kv_lo, segment.kv_hi), segment.band)
        return
    tile = segment.tile.shrink()
    for one in () if tile is None else cut(tile):
        yield _part(whole, one.q, one.kv, one.band)


def _part(whole: Segments, q: Span, kv: Span, band: Band) -> Part:
    rows, columns = Rows(q.lo, q.hi, whole.q_len), Rows(kv.lo, kv.hi, whole.kv_len)
    same = rows.is_all and columns.is_all and len(whole.parts) == 1 and whole.band == band
    return Part(rows, columns, whole if same else Segments.one(band, len(q), len(kv), ragged=whole.ragged))


def _group(whole: Segments, window: Band, served: Sequence[Joined], *, skips: bool) -> Part:
    """The varlen launch of segments that one window serves."""
    q = [Span(same[0].q_lo, same[0].q_hi) for same in served]
    kv = [Span(s.kv_lo, s.kv_hi) for same in served for s in same]
    kv_at = [*accumulate(map(_keys, served), initial=0)]
    q_at, q_len = [span.lo for span in q], whole.q_len
    if not skips:
        *q_at, q_len = accumulate(map(len, q), initial=0)
    parts = tuple(
        Segment(q_at[i], q_at[i] + len(q[i]), kv_at[i], kv_at[i + 1], same[-1].band) for i, same in enumerate(served)
    )
    rows = Rows(0, q_len, q_len) if skips else _rows(q, whole.q_len)
    return Part(rows, _rows(kv, whole.kv_len), Segments(parts, q_len, kv_at[-1], window))


def _rows(spans: Sequence[Span], length: int) -> Rows:
    """The rows of several spans, in their order."""
    if all(before.hi == after.lo for before, after in pairwise(spans)):
        return Rows(spans[0].lo, spans[-1].hi, length)
    lo, hi = min(span.lo for span in spans), max(span.hi for span in spans)
    return Rows(lo, hi, length, tuple(spans))


def _serves(window: Band, same: Joined) -> bool:
    """The window shows the same pairs of a segment as its own band: a bound that never binds may be added."""
    band, q_len, kv_len = same[-1].band, same[0].q_hi - same[0].q_lo, _keys(same)
    left = window.left == band.left or (band.left < 0 and window.left >= kv_len - 1)
    right = window.right == band.right or (band.right < 0 and window.right >= q_len - 1)
    return left and right


def _keys(same: Joined) -> int:
    return sum(s.kv_hi - s.kv_lo for s in same)


def moved(values: list[int] | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy the values, on the CPU, to a device without waiting for it."""
    with unrecorded():
        tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def visible(band: Band, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor | None:
    """Return the pairs that the band shows, bool (q_len, kv_len), or None where it shows all."""
    if band.left < 0 and band.right < 0:
        return None
    row = torch.arange(q_len, device=device).unsqueeze(1)
    column = torch.arange(kv_len, device=device).unsqueeze(0)
    distance = column - row - (kv_len - q_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if band.left >= 0:
        seen &= distance >= -band.left
    if band.right >= 0:
        seen &= distance <= band.right
    return seen


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
