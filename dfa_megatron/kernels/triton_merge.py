"""Folding partials as one Triton kernel: every value is read once and written once, in its final dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.triton_support import interpreted, on_device_of


@triton.jit
def _merge(
    out0, out1, out2, out3, lse0, lse1, lse2, lse3, into_out, into_lse, length, heads,
    out0_batch, out0_row, out0_head, lse0_batch, lse0_head, lse0_row,
    out1_batch, out1_row, out1_head, lse1_batch, lse1_head, lse1_row,
    out2_batch, out2_row, out2_head, lse2_batch, lse2_head, lse2_row,
    out3_batch, out3_row, out3_head, lse3_batch, lse3_head, lse3_row,
    into_batch, into_row, into_head, into_lse_batch, into_lse_head, into_lse_row,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head, of the first COUNT parts. `into` may be the first."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    there = rows < length
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < DIM)[None, :]
    rows = rows.to(tl.int64)
    a = tl.load(lse0 + batch * lse0_batch + head * lse0_head + rows * lse0_row, mask=there, other=0.0).to(tl.float32)
    b = tl.load(lse1 + batch * lse1_batch + head * lse1_head + rows * lse1_row, mask=there, other=0.0).to(tl.float32)
    peak = tl.maximum(a, b)
    if COUNT > 2:
        c = tl.load(lse2 + batch * lse2_batch + head * lse2_head + rows * lse2_row, mask=there, other=0.0)
        c = c.to(tl.float32)
        peak = tl.maximum(peak, c)
    if COUNT > 3:
        d = tl.load(lse3 + batch * lse3_batch + head * lse3_head + rows * lse3_row, mask=there, other=0.0)
        d = d.to(tl.float32)
        peak = tl.maximum(peak, d)
    peak = tl.where(peak == -float("inf"), 0.0, peak)  # -inf - -inf would be NaN
    a, b = tl.exp(a - peak), tl.exp(b - peak)
    total = a + b
    at = rows[:, None]
    x0 = tl.load(out0 + batch * out0_batch + head * out0_head + at * out0_row + dims[None, :], mask=inside, other=0.0)
    x1 = tl.load(out1 + batch * out1_batch + head * out1_head + at * out1_row + dims[None, :], mask=inside, other=0.0)
    merged = a[:, None] * x0.to(tl.float32) + b[:, None] * x1.to(tl.float32)
    if COUNT > 2:
        c = tl.exp(c - peak)
        total += c
        x2 = tl.load(
            out2 + batch * out2_batch + head * out2_head + at * out2_row + dims[None, :], mask=inside, other=0.0
        )
        merged += c[:, None] * x2.to(tl.float32)
    if COUNT > 3:
        d = tl.exp(d - peak)
        total += d
        x3 = tl.load(
            out3 + batch * out3_batch + head * out3_head + at * out3_row + dims[None, :], mask=inside, other=0.0
        )
        merged += d[:, None] * x3.to(tl.float32)
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    into_out += batch * into_batch + head * into_head + at * into_row + dims[None, :]
    into_lse += batch * into_lse_batch + head * into_lse_head + rows * into_lse_row
    # Several warps load the same lse, because a vector of rows is repeated over them. None may store before all have
    # loaded, or a late one would take the merged lse for the old one where into is the first part.
    tl.debug_barrier()
    tl.store(into_lse, peak + tl.log(total), mask=there)
    tl.store(into_out, merged.to(into_out.dtype.element_ty), mask=inside)


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], into: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`into` becomes the merge of two to four partials (out, lse); shapes as in `merge.merge`.

    `into` is the first part, tensor for tensor, or shares no memory with any. Last dimensions of outs are contiguous.
    """
    batch, length, heads, dim = into[0].shape
    if not into[0].numel():
        return
    block_d = triton.next_power_of_2(dim)
    block_rows = 16 if interpreted() else max(1, 4096 // block_d)
    four = [*parts, *[parts[0]] * (4 - len(parts))]
    strides = [stride for out, lse in (*four, into) for stride in (*out.stride()[:3], *lse.stride())]
    with on_device_of(into[0]):
        _merge[(triton.cdiv(length, block_rows), batch * heads)](
            *(out for out, _ in four), *(lse for _, lse in four), *into, length, heads, *strides,
            COUNT=len(parts), DIM=dim, BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip


@triton.jit
def _add(
    x0, x1, x2, x3, into, count, x0_batch, x1_batch, x2_batch, x3_batch, into_batch,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK elements of one sequence, whose rows lie one after another."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    total = tl.load(x0 + batch * x0_batch + at, mask=there, other=0.0).to(tl.float32)
    total += tl.load(x1 + batch * x1_batch + at, mask=there, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(x2 + batch * x2_batch + at, mask=there, other=0.0).to(tl.float32)
    if COUNT > 3:
        total += tl.load(x3 + batch * x3_batch + at, mask=there, other=0.0).to(tl.float32)
    tl.store(into + batch * into_batch + at, total.to(into.dtype.element_ty), mask=there)


def add(parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """`into` becomes the float32 sum of two to four parts (batch, rows, heads, dim); all but the batch lies dense."""
    if not into.numel():
        return
    block = 128 if interpreted() else 4096
    batch, count = into.shape[0], into[0].numel()
    four = [*parts, *[parts[0]] * (4 - len(parts))]
    with on_device_of(into):
        _add[(triton.cdiv(count, block), batch)](
            *four, into, count, *(x.stride(0) for x in (*four, into)), COUNT=len(parts), BLOCK=block, num_warps=8
        )


@triton.jit
def _row_dot(
    a, b, into, length, heads, a_batch, a_row, a_head, b_batch, b_row, b_head,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    there = rows < length
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < DIM)[None, :]
    rows = rows.to(tl.int64)
    a += batch * a_batch + head * a_head + rows[:, None] * a_row + dims[None, :]
    b += batch * b_batch + head * b_head + rows[:, None] * b_row + dims[None, :]
    products = tl.load(a, mask=inside, other=0.0).to(tl.float32) * tl.load(b, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + (batch * heads + head) * length + rows, tl.sum(products, 1), mask=there)


def row_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """rowsum(a * b) of (batch, rows, heads, dim) tensors: float32 (batch, heads, rows)."""
    batch, length, heads, dim = a.shape
    into = a.new_empty((batch, heads, length), dtype=torch.float32)
    if not a.numel():
        return into.zero_()
    block_d = triton.next_power_of_2(dim)
    block_rows = 16 if interpreted() else max(1, 4096 // block_d)
    with on_device_of(a):
        _row_dot[(triton.cdiv(length, block_rows), batch * heads)](
            a, b, into, length, heads, *a.stride()[:3], *b.stride()[:3],
            DIM=dim, BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return into
