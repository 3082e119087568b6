"""The segments of a call or launch, and the rows that a launch takes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from dfa_megatron.kernels.current_stream import stream_of
from dfa_megatron.kernels.tape import unrecorded
from dfa_megatron.plan.language.geometry import Band, Segment, Span
from dfa_megatron.plan.language.program import Launch


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of one call over q_len x kv_len rows.

    There is one object per call or launch, so derived tables are cached on it.

    parts: in the order of their query rows. Those of a launch are disjoint on both sides; key rows of a varlen launch
        follow one another.
    window: set for a varlen launch: the one window that serves all of them.
    ragged: calls of many other lengths come, so a kernel had better not be compiled for these.
    split: the launches of a call, decided when it was prepared; None where the kernel still has to divide it.
    tables: cache of everything derived; each user chooses its keys.
    """

    parts: tuple[Segment, ...]
    q_len: int
    kv_len: int
    window: Band | None = None
    ragged: bool = False
    split: Split | None = None
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
    def lengths(self) -> tuple[list[int], list[int]]:
        """The query rows of each segment, and its key rows."""
        return [s.q_hi - s.q_lo for s in self.parts], [s.kv_hi - s.kv_lo for s in self.parts]

    @cached_property
    def max_q(self) -> int:
        """The most query rows of a segment."""
        return max(self.lengths[0])

    @cached_property
    def max_kv(self) -> int:
        """The most key rows of a segment."""
        return max(self.lengths[1])

    @cached_property
    def is_whole(self) -> bool:
        """No query row and no key row is between segments."""
        return tuple(map(sum, self.lengths)) == (self.q_len, self.kv_len)

    def offsets(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return int32 (segments + 1,) offsets into the query rows and into the key rows of a varlen launch.

        The third is the number of query rows of each segment, where there are gaps between them.
        """
        key = "offsets", device, stream_of(device)
        if key not in self.tables:
            (starts, ends), used = (list(accumulate(x, initial=0)) for x in self.lengths), None
            if starts[-1] < self.q_len:
                starts, used = [*(s.q_lo for s in self.parts), self.q_len], moved(self.lengths[0], torch.int32, device)
            self.tables[key] = *(moved(x, torch.int32, device) for x in (starts, ends)), used
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = self.tables[key]
        return found


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a tensor with `length` of them: those of spans, in their order.

    A key row is in several spans where several segments of a launch have it.
    """

    spans: tuple[Span, ...]
    length: int
    _on: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.spans))

    @cached_property
    def is_all(self) -> bool:
        """These are all rows of the tensor."""
        return len(self.spans) == 1 and self.count == self.length

    def take(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return these rows of x: a view, or a copy where they have gaps."""
        if self.is_all:
            return x
        if len(self.spans) == 1:
            return x.narrow(dim, self.spans[0].lo, self.count)
        return x.index_select(dim, self.indices(x.device))

    def put(self, x: torch.Tensor, value: torch.Tensor, dim: int = 1, *, add: bool = False) -> None:
        """Write these rows of x, or add to them."""
        if len(self.spans) > 1:
            x.index_copy_(dim, self.indices(x.device), value.to(x.dtype))
            return
        rows = x.narrow(dim, self.spans[0].lo, self.count)
        rows.add_(value) if add else rows.copy_(value)

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
            return torch.cat([torch.arange(span.lo, span.hi, device="cpu") for span in self.spans])


@dataclass(frozen=True, eq=False)
class Part:
    """One launch of a call: its rows, and their segments in the launch's own row numbers."""

    rows: Rows
    columns: Rows
    segments: Segments

    @cached_property
    def is_whole(self) -> bool:
        """The launch has all rows of the call."""
        return self.rows.is_all and self.columns.is_all


@dataclass(frozen=True, eq=False)
class Split:
    """The launches of a call over tensors; no query row is in two of them.

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
    def of(cls, launches: Sequence[Launch], q_len: int, kv_len: int, *, ragged: bool = False) -> Split:
        """Find out what launches cover in so many rows."""
        parts, covered = list[Part](), 0
        for launch in launches:
            rows, columns = Rows(launch.q, q_len), Rows(launch.kv, kv_len)
            segments = Segments(launch.segments, rows.count, columns.count, launch.window, ragged=ragged)
            parts.append(Part(rows, columns, segments))
            covered += rows.count if launch.window is None else sum(segments.lengths[0])
        fills_rows = covered == q_len
        alone = len(parts) == 1 and parts[0].rows.is_all
        only = parts[0] if alone and (fills_rows or parts[0].segments.window is None) else None
        spans = [span for p in parts for span in p.columns.spans]
        shares = any(before.hi > after.lo for before, after in pairwise(sorted(spans)))
        fills_columns = not shares and sum(map(len, spans)) == kv_len
        varlen = shares and all(launch.window is not None for launch in launches)
        copies = Rows(tuple(spans), kv_len) if varlen else None
        return cls(tuple(parts), only, fills_rows, fills_columns, shares, copies)


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
