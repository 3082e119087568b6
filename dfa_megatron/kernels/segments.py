"""Several attentions in one call: the segments of a call, grouped by the window that one varlen kernel can express.

A varlen kernel takes the rows of its segments one after another, and one window for all of them. So segments whose
windows are equal, or that one window serves, are a group, and rows that do not lie one after another are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from dfa_megatron.plan.language.geometry import Band, Segment, Span


@dataclass(frozen=True, slots=True)
class Table:
    """A group as a kernel reads it: int32 (segments + 1) offsets into its rows, and which rows these are, where they
    have to be gathered: int64 (rows,).
    """

    cu_q: torch.Tensor
    cu_kv: torch.Tensor
    q_rows: torch.Tensor | None
    kv_rows: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    """Segments that one window serves, aligned to the bottom right of each."""

    window: Band
    segments: tuple[Segment, ...]
    _tables: dict[tuple[torch.device, int], Table] = field(default_factory=dict, repr=False)

    @property
    def q(self) -> Span:
        """The query rows from the first to the last segment."""
        return Span(self.segments[0].q_lo, self.segments[-1].q_hi)

    @property
    def kv(self) -> Span:
        """The key rows from the first to the last segment."""
        return Span(self.segments[0].kv_lo, self.segments[-1].kv_hi)

    @cached_property
    def max_q(self) -> int:
        """The most query rows of a segment."""
        return max(s.q_hi - s.q_lo for s in self.segments)

    @cached_property
    def max_kv(self) -> int:
        """The most key rows of a segment."""
        return max(s.kv_hi - s.kv_lo for s in self.segments)

    def table(self, device: torch.device) -> Table:
        """The group on a device; made once per device and stream, and copied there without waiting."""
        key = device, stream_of(device)
        if key not in self._tables:
            q = [Span(s.q_lo, s.q_hi) for s in self.segments]
            kv = [Span(s.kv_lo, s.kv_hi) for s in self.segments]
            self._tables[key] = Table(
                moved(list(accumulate(map(len, q), initial=0)), torch.int32, device),
                moved(list(accumulate(map(len, kv), initial=0)), torch.int32, device),
                _rows(q, device),
                _rows(kv, device),
            )
        return self._tables[key]


def _rows(spans: Sequence[Span], device: torch.device) -> torch.Tensor | None:
    """The rows of spans that do not follow each other, or None where they do."""
    if spans[-1].hi - spans[0].lo == sum(map(len, spans)):
        return None
    return moved([row for span in spans for row in range(span.lo, span.hi)], torch.int64, device)


def stream_of(device: torch.device) -> int:
    """The current stream; what one stream has copied to a device another may not read yet."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def moved(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values on a device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of one call over q_len x kv_len rows; one object per call, so that what is derived is derived once.

    tables: what kernels made of them, by whatever tells it apart.
    """

    parts: tuple[Segment, ...]
    q_len: int
    kv_len: int
    tables: dict[object, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def is_whole(self) -> bool:
        """No query row and no key row is between segments."""
        q, kv = sum(s.q_hi - s.q_lo for s in self.parts), sum(s.kv_hi - s.kv_lo for s in self.parts)
        return q == self.q_len and kv == self.kv_len

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """As few groups as the windows allow."""
        left = list(self.parts)
        out = []
        # The most constrained windows first: they serve those that have fewer bounds of their own.
        for window in sorted({s.band for s in left}, key=lambda b: ((b.left < 0) + (b.right < 0), b)):
            served = tuple(s for s in left if _serves(window, s))
            if served:
                out.append(Group(window, served))
                left = [s for s in left if not _serves(window, s)]
        return tuple(out)


def _serves(window: Band, segment: Segment) -> bool:
    """The window lets the same pairs of a segment through as its own band: a bound that never binds may be added."""
    band, q_len, kv_len = segment.band, segment.q_hi - segment.q_lo, segment.kv_hi - segment.kv_lo
    left = window.left == band.left or (band.left < 0 and window.left >= kv_len - 1)
    right = window.right == band.right or (band.right < 0 and window.right >= q_len - 1)
    return left and right
