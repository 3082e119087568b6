"""Calls of several segments: in one launch where a kernel can, group by group, or a block for each segment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypedDict, TypeGuard

import torch

from dfa_megatron.kernels.alibi import Biasing
from dfa_megatron.kernels.api import BlockKernel, Saved, VarlenKernel, accumulator_dtype
from dfa_megatron.kernels.segments import Group, Segments, Table
from dfa_megatron.plan.language.geometry import Span

Results = tuple[torch.Tensor, ...]


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
    if q.shape[0] == 1 and is_varlen(kernel):
        return kernel.forward_segments(q, k, v, segments=segments, softmax_scale=softmax_scale)
    return loop_forward(kernel, q, k, v, segments=segments, softmax_scale=softmax_scale)


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
    options = Options(softmax_scale=softmax_scale, deterministic=deterministic)
    if len(segments.parts) == 1:
        return kernel.backward(dout, q, k, v, saved, band=segments.parts[0].band, **options)
    if q.shape[0] == 1 and is_varlen(kernel):
        return kernel.backward_segments(dout, q, k, v, saved, segments=segments, **options)
    return loop_backward(kernel, dout, q, k, v, saved, segments=segments, **options)


class Options(TypedDict):
    """What every backward is told beside tensors and segments."""

    softmax_scale: float
    deterministic: bool


def is_varlen(kernel: BlockKernel) -> TypeGuard[VarlenKernel]:
    """The kernel takes several segments at once; a look at one attribute, for this is asked at every call."""
    return hasattr(kernel, "forward_segments")


def loop_forward(
    kernel: BlockKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    segments: Segments,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` as a block for each segment."""
    out, lse = new_out(q, v, segments.is_whole)
    for s in segments.parts:
        rows, columns = slice(s.q_lo, s.q_hi), slice(s.kv_lo, s.kv_hi)
        out[:, rows], lse[:, :, rows] = _of_rows(kernel, rows, columns).forward(
            q[:, rows], k[:, columns], v[:, columns], band=s.band, softmax_scale=softmax_scale
        )
    return out, lse


def loop_backward(
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
    """`backward` as a block for each segment."""
    options = Options(softmax_scale=softmax_scale, deterministic=deterministic)
    gradients = new_gradients(q, k, v, segments.is_whole)
    for s in segments.parts:
        rows, columns = slice(s.q_lo, s.q_hi), slice(s.kv_lo, s.kv_hi)
        of_rows = dout[:, rows], q[:, rows], k[:, columns], v[:, columns], saved_rows(saved, rows)
        parts = _of_rows(kernel, rows, columns).backward(*of_rows, band=s.band, **options)
        for whole, where, part in zip(gradients, (rows, columns, columns), parts, strict=True):
            whole[:, where] = part
    return gradients


def _of_rows(kernel: BlockKernel, rows: slice, columns: slice) -> BlockKernel:
    """The kernel for some rows of a call, where it knows of the call's rows at all."""
    if isinstance(kernel, Biasing) and kernel.alibi is not None:
        return kernel.biased(kernel.alibi.of_rows(rows, columns))
    return kernel


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
