"""Merging partials as one Triton kernel: every value is read once and written once, in its final dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.triton.support import interpreted, launch, on_device_of

_LENGTHS = ("length", "rows0", "rows1", "rows2", "rows3", "into_rows")
_STATISTICS = ("lse0", "lse1", "lse2", "lse3", "into_lse")
"""Arguments whose values and alignment compile no new kernel: documents of any length begin and end at any row."""


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_STATISTICS)
def _merge(
    out0, out1, out2, out3, lse0, lse1, lse2, lse3, into_out, into_lse, length, heads,
    out0_batch, out1_batch, out2_batch, out3_batch, into_batch, rows0, rows1, rows2, rows3, into_rows,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head, of the first COUNT parts. `into` may be one of them.

    Rows are slices of dense tensors: an out's batches are `*_batch` elements apart, an lse's heads `rows*`.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    there = rows < length
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < DIM)[None, :]
    rows = rows.to(tl.int64)
    one = batch * heads + head
    at = (rows * heads + head)[:, None] * DIM + dims[None, :]
    a = tl.load(lse0 + one * rows0 + rows, mask=there, other=0.0).to(tl.float32)
    b = tl.load(lse1 + one * rows1 + rows, mask=there, other=0.0).to(tl.float32)
    peak = tl.maximum(a, b)
    if COUNT > 2:
        c = tl.load(lse2 + one * rows2 + rows, mask=there, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, c)
    if COUNT > 3:
        d = tl.load(lse3 + one * rows3 + rows, mask=there, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, d)
    peak = tl.where(peak == -float("inf"), 0.0, peak)  # -inf - -inf would be NaN
    a, b = tl.exp(a - peak), tl.exp(b - peak)
    total = a + b
    merged = a[:, None] * tl.load(out0 + batch * out0_batch + at, mask=inside, other=0.0).to(tl.float32)
    merged += b[:, None] * tl.load(out1 + batch * out1_batch + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 2:
        c = tl.exp(c - peak)
        total += c
        merged += c[:, None] * tl.load(out2 + batch * out2_batch + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 3:
        d = tl.exp(d - peak)
        total += d
        merged += d[:, None] * tl.load(out3 + batch * out3_batch + at, mask=inside, other=0.0).to(tl.float32)
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    # Several warps load the same lse, because a vector of rows is repeated over them. None may store before all have
    # loaded, or a late one would take the merged lse for the old one where into is a part.
    tl.debug_barrier()
    tl.store(into_lse + one * into_rows + rows, peak + tl.log(total), mask=there)
    tl.store(into_out + batch * into_batch + at, merged.to(into_out.dtype.element_ty), mask=inside)


def takes(out: torch.Tensor, lse: torch.Tensor) -> bool:
    """A partial whose rows are a slice of dense tensors, which is what `merge` can address."""
    heads, dim = out.shape[2:]
    stride, lse_stride = out.stride(), lse.stride()
    return stride[1:] == (heads * dim, dim, 1) and lse_stride[0] == heads * lse_stride[1] and lse_stride[2] == 1


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], into: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`into` becomes the merge of two to four partials (out, lse); shapes as in `merge.merge`, all as `takes` wants.

    `into` is one of the parts, tensor for tensor, or shares no memory with any.
    """
    batch, length, heads, dim = into[0].shape
    if not into[0].numel():
        return
    block_d = triton.next_power_of_2(dim)
    block_rows = 16 if interpreted() else max(1, 4096 // block_d)
    outs, lses = zip(*parts, *[parts[0]] * (4 - len(parts)), strict=True)
    with on_device_of(into[0]):
        launch(
            _merge, (triton.cdiv(length, block_rows), batch * heads), *outs, *lses, *into, length, heads,
            *(out.stride(0) for out in (*outs, into[0])), *(lse.stride(1) for lse in (*lses, into[1])),
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
        launch(
            _add, (triton.cdiv(count, block), batch), *four, into, count, *(x.stride(0) for x in (*four, into)),
            COUNT=len(parts), BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit
def _sum_rows(x, starts, places, into, width, BLOCK: tl.constexpr):
    """One program: BLOCK elements of one row of `into`."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, to = at < width, into + row.to(tl.int64) * width + at
    total = tl.zeros([BLOCK], tl.float32)
    number, end = tl.load(starts + row), tl.load(starts + row + 1)
    while number < end:
        place = tl.load(places + number).to(tl.int64)
        total += tl.load(x + place * width + at, mask=there, other=0.0).to(tl.float32)
        number += 1
    tl.store(to, total.to(into.dtype.element_ty), mask=there)


def sum_rows(x: torch.Tensor, sources: tuple[torch.Tensor, torch.Tensor], into: torch.Tensor) -> None:
    """Sum to each row of `into` (1, rows, heads, dim) the rows of x (1, copies, heads, dim) at its places.

    sources: int32 (rows + 1,) offsets into the places of all rows.
    """
    width = into.shape[2] * into.shape[3]
    block = min(triton.next_power_of_2(width), 1024)
    with on_device_of(into):
        launch(
            _sum_rows, (into.shape[1], triton.cdiv(width, block)), x, *sources, into, width, BLOCK=block, num_warps=4
        )


@triton.jit(do_not_specialize=_LENGTHS[:1])
def _minus_delta(
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
    # Rounded before they are summed (enable_fp_fusion=False): the threads of a row each keep its sum, and all store it
    # to one word. Where each fuses its own product into the first addition, their sums would differ in the last bit.
    products = tl.load(a, mask=inside, other=0.0).to(tl.float32) * tl.load(b, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + (batch * heads + head) * length + rows, -tl.sum(products, 1), mask=there)


def minus_delta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """-rowsum(a * b) of (batch, rows, heads, dim) tensors: float32 (batch, heads, rows)."""
    batch, length, heads, dim = a.shape
    into = a.new_empty((batch, heads, length), dtype=torch.float32)
    if not a.numel():
        return into.zero_()
    block_d = triton.next_power_of_2(dim)
    block_rows = 16 if interpreted() else max(1, 4096 // block_d)
    with on_device_of(a):
        launch(
            _minus_delta, (triton.cdiv(length, block_rows), batch * heads), a, b, into, length, heads,
            *a.stride()[:3], *b.stride()[:3], DIM=dim, BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return into
