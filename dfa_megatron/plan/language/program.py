"""The program of one rank: a flat list of steps over numbered buffers, lowered from a plan and checked in this form."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple

from dfa_megatron.plan.language.geometry import Band, Segment, Span, Tile
from dfa_megatron.plan.language.ir import Phase


class Destination(Enum):
    """Where rows of a partial go: saved as they came, or merged into the sum or the result."""

    SAVED = "saved"
    SUM = "sum"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class RowsMerge:
    """Rows of a partial that are merged alike.

    lo, hi: rows of the buffer. skip: the partial's row for `lo`. saved: indices of earlier writes merged in this step.
    sum: merge the running sum too. into: destination. freed: indices of saved partials that can be freed afterwards.
    first: where the order is fixed, whether each saved partial goes first. They are merged one by one then.
    """

    lo: int
    hi: int
    skip: int
    saved: tuple[int, ...]
    sum: bool
    into: Destination
    freed: tuple[int, ...] = ()
    first: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteMerge:
    """How one write is merged.

    may_become_result: it is a kernel's own output of all rows, whose memory may become the result.
    may_keep: it is a kernel's own output, which may wait as it is.
    """

    rows: tuple[RowsMerge, ...]
    may_become_result: bool
    may_keep: bool = True


@dataclass(frozen=True, slots=True)
class BufferMerges:
    """How an accumulator is filled.

    writes: in their order. empty: rows that no write reaches. sum: the rows from the first to the last that is ever
    summed; empty where none is. ordered: partials merge in a fixed tree, see `plan.language.leaves`.
    """

    writes: tuple[WriteMerge, ...]
    empty: tuple[Span, ...]
    sum: Span
    ordered: bool = False


class Buffer(NamedTuple):
    """Rows of one or several names that live together.

    parts: (name, rows) in order. slot: the memory that holds it; buffers of one slot never live at the same time.
    A buffer of the rank's own rows has no slot: it is an input or a result of the call. merges: how an accumulator (in
    the accumulator's dtype) is filled; None for an input or a received message. The two share no slot.
    """

    parts: tuple[tuple[str, int], ...]
    slot: int | None
    merges: BufferMerges | None = None


class Region(NamedTuple):
    """Rows lo..hi of one name in one buffer."""

    buffer: int
    name: str
    lo: int
    hi: int

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.hi - self.lo


@dataclass(frozen=True, slots=True)
class Message:
    """The message between this rank and one peer in one step.

    Each part is a name whose rows are the given regions, one after another; a received part is one region.
    """

    peer: int
    parts: tuple[tuple[Region, ...], ...]

    @property
    def signature(self) -> tuple[tuple[str, int], ...]:
        """Return (name, rows) of each part: equal on both ends."""
        return tuple((regions[0].name, sum(region.rows for region in regions)) for regions in self.parts)


_Shifted = list[tuple[Span, int]]
"""Rows of a launch, and the distance of the call's rows from them."""


def _placed(spans: Sequence[Span]) -> _Shifted:
    out, at = list[tuple[Span, int]](), 0
    for span in spans:
        out.append((Span(at, at + len(span)), span.lo - at))
        at += len(span)
    return out


def _among(places: _Shifted, rows: Span) -> _Shifted:
    """Return the places that meet some rows."""
    first = bisect_right(places, rows.lo, key=lambda place: place[0].hi)
    return places[first : bisect_left(places, rows.hi, first, key=lambda place: place[0].lo)]


LaunchKind = Literal["segment", "window", "segments"]
"""What one launch computes: one segment, several that share one window, or several of any bands."""


class Launch(NamedTuple):
    """One launch of a kernel call: rows of the call, and segments in the launch's own row numbers.

    q, kv: spans of the call's rows, which the launch has one after another. A key row is in several where segments
    share it. window: serves all segments of a varlen launch; None where each has its band.
    """

    q: tuple[Span, ...]
    kv: tuple[Span, ...]
    segments: tuple[Segment, ...]
    window: Band | None = None

    def tiles(self) -> Iterator[Tile]:
        """Yield the pairs that the launch computes, in the call's rows."""
        rows, keys = _placed(self.q), _placed(self.kv)
        for segment in self.segments:
            tile = (segment if self.window is None else replace(segment, band=self.window)).tile
            if len(rows) == len(keys) == 1:  # the usual case
                if shrunk := tile.shrink():
                    yield shrunk.shift(rows[0][1], keys[0][1])
                continue
            for q, by_q in _among(rows, tile.q):
                for kv, by_kv in _among(keys, tile.kv):
                    if part := tile.restrict(q, kv):
                        yield part.shift(by_q, by_kv)

    def written(self) -> list[Span]:
        """Return the query rows of the segments, in the call's rows."""
        rows = _placed(self.q)
        spans = (Span(segment.q_lo, segment.q_hi) for segment in self.segments)
        return [(part & span).shift(by) for span in spans for part, by in _among(rows, span)]


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call over rows of a q and of a kv buffer, and the accumulator's rows for each name of the phase.

    launches: no query row is in two of them. A row in none has the identity of the merge as its result.
    writes: of q, then of kv.
    """

    q: Region
    kv: Region
    launches: tuple[Launch, ...]
    writes: tuple[Region, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return what is computed, as segments in the call's rows."""
        whole = (Span(0, self.q.rows),), (Span(0, self.kv.rows),)
        if len(self.launches) == 1 and self.launches[0][:2] == whole:
            return self.launches[0].segments
        tiles = (tile for launch in self.launches for tile in launch.tiles())
        return tuple(sorted(Segment(t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.band) for t in tiles))


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of a landed partial into an accumulator."""

    source: Region
    write: Region


@dataclass(frozen=True, slots=True)
class Step:
    """Post the messages, compute while they travel, then land them.

    after: the last step whose compute must be over before this step's messages may move (-1: none). That compute wrote
    rows that are sent, or read rows that are overwritten.
    """

    after: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    calls: tuple[Call, ...]
    merges: tuple[Merge, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's whole phase. Its first buffers hold its own rows: the phase's reads in order, then its writes."""

    rank: int
    ranks: int
    phase: Phase
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def home_buffer(self, name: str) -> int:
        """Return the index of the buffer that holds this rank's own rows of a name."""
        names = [read for _, read in self.phase.reads] + list(self.phase.write_names)
        return names.index(name)

    @property
    def slots(self) -> dict[int, tuple[Buffer, ...]]:
        """Return each slot with the buffers that use it, one after another; those of accumulators only count memory."""
        tenants: dict[int, tuple[Buffer, ...]] = {}
        for buffer in self.buffers:
            if buffer.slot is not None:
                tenants[buffer.slot] = (*tenants.get(buffer.slot, ()), buffer)
        return tenants

    @property
    def sends(self) -> tuple[Message, ...]:
        """Return the messages that this rank sends."""
        return tuple(message for step in self.steps for message in step.sends)

    def peak_slots(self) -> dict[str, int]:
        """Return the number of slots per name for remote chunks on this rank, messages and accumulators together."""
        peak: dict[str, int] = {}
        for buffers in self.slots.values():
            for name in {name for buffer in buffers for name, _ in buffer.parts}:
                peak[name] = peak.get(name, 0) + 1
        return peak
