"""Folding two partials as one Triton kernel each: every value is read once and written once, in its final dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.triton_support import interpreted, on_device_of


@triton.jit
def _merge(
    old_out, old_lse, new_out, new_lse, into_out, into_lse, length, heads,
    old_batch, old_row, old_head, old_lse_batch, old_lse_head, old_lse_row,
    new_batch, new_row, new_head, new_lse_batch, new_lse_head, new_lse_row,
    into_batch, into_row, into_head, into_lse_batch, into_lse_head, into_lse_row,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head. `into` may be `old`."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    there = rows < length
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < DIM)[None, :]
    rows = rows.to(tl.int64)
    old_lse += batch * old_lse_batch + head * old_lse_head + rows * old_lse_row
    new_lse += batch * new_lse_batch + head * new_lse_head + rows * new_lse_row
    before = tl.load(old_lse, mask=there, other=0.0).to(tl.float32)
    here = tl.load(new_lse, mask=there, other=0.0).to(tl.float32)
    gap = tl.where(here == -float("inf"), -float("inf"), here - before)  # -inf - -inf would be NaN
    # sigmoid(gap) and log(1 + exp(-|gap|)) through exp(-|gap|), which cannot overflow.
    small = tl.exp(-tl.abs(gap))
    weight = tl.where(gap >= 0, 1.0, small) / (1.0 + small)
    weight = tl.where(gap == gap, weight, gap)[:, None]
    peak = tl.where(gap > 0, here, before)
    merged_lse = tl.where(gap == -float("inf"), before, peak + tl.log(1.0 + small))
    old_out += batch * old_batch + head * old_head + rows[:, None] * old_row + dims[None, :]
    new_out += batch * new_batch + head * new_head + rows[:, None] * new_row + dims[None, :]
    old = tl.load(old_out, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(new_out, mask=inside, other=0.0).to(tl.float32)
    # From the nearer end, so that a weight of 0 or 1 gives that side exactly.
    step = new - old
    merged = tl.where(weight < 0.5, old + weight * step, new - (1.0 - weight) * step)
    into_out += batch * into_batch + head * into_head + rows[:, None] * into_row + dims[None, :]
    into_lse += batch * into_lse_batch + head * into_lse_head + rows * into_lse_row
    # Several warps load the same lse, because a vector of rows is repeated over them. None may store before all have
    # loaded, or a late one would take the merged lse for the old one where into is old.
    tl.debug_barrier()
    tl.store(into_lse, tl.where(gap == gap, merged_lse, gap), mask=there)
    tl.store(into_out, merged.to(into_out.dtype.element_ty), mask=inside)


def merge(
    old: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    into: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`into` becomes the merge of the partials (out, lse) `old` and `new`; shapes as in `merge.merge`.

    `into` is `old`, tensor for tensor, or shares no memory with it. Last dimensions of every out are contiguous.
    """
    batch, length, heads, dim = into[0].shape
    if not into[0].numel():
        return
    block_d = triton.next_power_of_2(dim)
    block_rows = 16 if interpreted() else max(1, 4096 // block_d)
    strides = [stride for out, lse in (old, new, into) for stride in (*out.stride()[:3], *lse.stride())]
    with on_device_of(into[0]):
        _merge[(triton.cdiv(length, block_rows), batch * heads)](
            *old, *new, *into, length, heads, *strides,
            DIM=dim, BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip


@triton.jit
def _add(old, new, into, count, old_batch, new_batch, into_batch, BLOCK: tl.constexpr):
    """One program: BLOCK elements of one sequence, whose rows lie one after another."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    a = tl.load(old + batch * old_batch + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(new + batch * new_batch + at, mask=there, other=0.0).to(tl.float32)
    tl.store(into + batch * into_batch + at, (a + b).to(into.dtype.element_ty), mask=there)


def add(old: torch.Tensor, new: torch.Tensor, into: torch.Tensor) -> None:
    """`into` becomes old + new, added in float32: (batch, rows, heads, dim) each, dense but for the batch's stride."""
    if not into.numel():
        return
    block = 128 if interpreted() else 4096
    batch, count = into.shape[0], into[0].numel()
    with on_device_of(into):
        _add[(triton.cdiv(count, block), batch)](
            old, new, into, count, old.stride(0), new.stride(0), into.stride(0), BLOCK=block, num_warps=8
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
