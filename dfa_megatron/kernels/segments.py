"""Several attentions in one call: the segments of a call, grouped by the window that one varlen kernel can express.

A varlen kernel takes the rows of its segments one after another, and one window for all of them. So segments whose
windows are equal, or that one window serves, are a group, and rows that do not lie one after another are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from dfa_megatron.kernels.api import BlockKernel, Saved, VarlenKernel, accumulator_dtype
from dfa_megatron.plan.geometry import Band, Segment, Span

Results = tuple[torch.Tensor, ...]


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


def forward(
    kernel: BlockKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    segments: Segments,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call; a row of no segment has out 0 and lse -inf.

    One segment is one block. Several are one call of a kernel that can, for a batch of one, else a call each.
    """
    if len(segments.parts) == 1:
        return kernel.forward(q, k, v, band=segments.parts[0].band, softmax_scale=softmax_scale)
    if isinstance(kernel, VarlenKernel) and q.shape[0] == 1:
        return kernel.forward_segments(q, k, v, segments=segments, softmax_scale=softmax_scale)
    out, lse = new_out(q, v, segments.is_whole)
    for s in segments.parts:
        rows, columns = slice(s.q_lo, s.q_hi), slice(s.kv_lo, s.kv_hi)
        out[:, rows], lse[:, :, rows] = kernel.forward(
            q[:, rows], k[:, columns], v[:, columns], band=s.band, softmax_scale=softmax_scale
        )
    return out, lse


def backward(
    kernel: BlockKernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    *,
    segments: Segments,
    softmax_scale: float,
    deterministic: bool,
) -> Results:
    """(dq, dk, dv) of a call, as `forward`; rows of no segment have gradients of 0."""
    options = {"softmax_scale": softmax_scale, "deterministic": deterministic}
    if len(segments.parts) == 1:
        return kernel.backward(dout, q, k, v, saved, band=segments.parts[0].band, **options)  # type: ignore[arg-type]
    if isinstance(kernel, VarlenKernel) and q.shape[0] == 1:
        return kernel.backward_segments(dout, q, k, v, saved, segments=segments, **options)  # type: ignore[arg-type]
    gradients = new_gradients(q, k, v, segments.is_whole)
    for s in segments.parts:
        rows, columns = slice(s.q_lo, s.q_hi), slice(s.kv_lo, s.kv_hi)
        part = kernel.backward(
            dout[:, rows], q[:, rows], k[:, columns], v[:, columns], saved_rows(saved, rows), band=s.band, **options  # type: ignore[arg-type]
        )  # fmt: skip
        for whole, where, value in zip(gradients, (rows, columns, columns), part, strict=True):
            whole[:, where] = value
    return gradients


def saved_rows(saved: Saved, rows: slice) -> Saved:
    """What is saved of some rows."""
    return Saved(
        lse=saved.lse[:, :, rows],
        delta=None if saved.delta is None else saved.delta[:, :, rows],
        out=None if saved.out is None else saved.out[:, rows],
    )


def new_out(q: torch.Tensor, v: torch.Tensor, is_whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for (out, lse), with the identity in it unless every row will be written."""
    batch, q_len, heads, _ = q.shape
    out, lse = q.new_empty(batch, q_len, heads, v.shape[-1]), q.new_empty(
        batch, heads, q_len, dtype=accumulator_dtype(q.dtype)
    )  # fmt: skip
    return (out, lse) if is_whole else (out.zero_(), lse.fill_(-math.inf))


def new_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_whole: bool) -> Results:
    """Memory for (dq, dk, dv), zeroed unless every row will be written."""
    new = torch.empty_like if is_whole else torch.zeros_like
    return tuple(new(x, memory_format=torch.contiguous_format) for x in (q, k, v))


GroupForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Group, Table], tuple[torch.Tensor, torch.Tensor]]
"""(q, k, v, group, table) -> (out, lse): (rows, heads, dim) each, lse (heads, rows)."""

GroupBackward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved, Group, Table], tuple[torch.Tensor, ...]
]
"""(dout, q, k, v, saved, group, table) -> (dq, dk, dv), without a batch dimension all."""


def forward_by_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, group_forward: GroupForward
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call from one varlen kernel call per group."""
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    for group in segments.groups:
        table = group.table(q.device)
        k_rows, v_rows = (_take(x[0], group.kv, table.kv_rows) for x in (k, v))
        out_part, lse_part = group_forward(_take(q[0], group.q, table.q_rows), k_rows, v_rows, group, table)
        if segments.is_whole and len(segments.groups) == 1:
            return out_part.unsqueeze(0), lse_part.unsqueeze(0)
        if out is None or lse is None:
            out, lse = new_out(q, v, segments.is_whole)
        _put(out[0], group.q, table.q_rows, out_part, 0)
        _put(lse[0], group.q, table.q_rows, lse_part, 1)
    assert out is not None and lse is not None, "a call has segments"  # noqa: PT018
    return out, lse


def backward_by_groups(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    segments: Segments,
    group_backward: GroupBackward,
) -> Results:
    """(dq, dk, dv) of a call from one varlen kernel call per group."""
    gradients: Results = ()
    for group in segments.groups:
        table = group.table(q.device)
        dout_rows, q_rows = (_take(x[0], group.q, table.q_rows) for x in (dout, q))
        k_rows, v_rows = (_take(x[0], group.kv, table.kv_rows) for x in (k, v))
        of_rows = Saved(
            lse=_take(saved.lse[0], group.q, table.q_rows, 1),
            delta=None if saved.delta is None else _take(saved.delta[0], group.q, table.q_rows, 1),
            out=None if saved.out is None else _take(saved.out[0], group.q, table.q_rows),
        )
        parts = group_backward(dout_rows, q_rows, k_rows, v_rows, of_rows, group, table)
        if segments.is_whole and len(segments.groups) == 1:
            return tuple(part.unsqueeze(0) for part in parts)
        gradients = gradients or new_gradients(q, k, v, segments.is_whole)
        where = (group.q, table.q_rows), (group.kv, table.kv_rows), (group.kv, table.kv_rows)
        for whole, (span, index), part in zip(gradients, where, parts, strict=True):
            _put(whole[0], span, index, part, 0)
    return gradients


def _take(x: torch.Tensor, span: Span, rows: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    return x.narrow(dim, span.lo, len(span)) if rows is None else x.index_select(dim, rows)


def _put(x: torch.Tensor, span: Span, rows: torch.Tensor | None, value: torch.Tensor, dim: int) -> None:
    if rows is None:
        x.narrow(dim, span.lo, len(span)).copy_(value)
    else:
        x.index_copy_(dim, rows, value.to(x.dtype))
