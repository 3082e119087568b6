"""Merging a partial into an accumulator as one Triton kernel: each value is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.triton_support import interpreted, on_device_of


@triton.jit
def _merge(
    acc_out, acc_lse, out, lse, into, length, heads,
    acc_batch, acc_row, acc_head, acc_lse_batch, acc_lse_head, acc_lse_row,
    out_batch, out_row, out_head, lse_batch, lse_head, lse_row, into_batch, into_row, into_head,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head. `into` may be acc_out."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    there = rows < length
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < DIM)[None, :]
    rows = rows.to(tl.int64)
    acc_lse += batch * acc_lse_batch + head * acc_lse_head + rows * acc_lse_row
    old_lse = tl.load(acc_lse, mask=there, other=0.0)
    new_lse = tl.load(lse + batch * lse_batch + head * lse_head + rows * lse_row, mask=there, other=0.0).to(tl.float32)
    gap = tl.where(new_lse == -float("inf"), -float("inf"), new_lse - old_lse)  # -inf - -inf would be NaN
    # sigmoid(gap) and log(1 + exp(-|gap|)) through exp(-|gap|), which cannot overflow.
    small = tl.exp(-tl.abs(gap))
    weight = tl.where(gap >= 0, 1.0, small) / (1.0 + small)
    weight = tl.where(gap == gap, weight, gap)[:, None]
    peak = tl.where(gap > 0, new_lse, old_lse)
    merged_lse = tl.where(gap == -float("inf"), old_lse, peak + tl.log(1.0 + small))
    acc_out += batch * acc_batch + head * acc_head + rows[:, None] * acc_row + dims[None, :]
    old = tl.load(acc_out, mask=inside, other=0.0)
    new_pointers = out + batch * out_batch + head * out_head + rows[:, None] * out_row + dims[None, :]
    new = tl.load(new_pointers, mask=inside, other=0.0).to(tl.float32)
    # From the nearer end, so that a weight of 0 or 1 gives that side exactly.
    step = new - old
    merged = tl.where(weight < 0.5, old + weight * step, new - (1.0 - weight) * step)
    into += batch * into_batch + head * into_head + rows[:, None] * into_row + dims[None, :]
    # Several warps load the same lse, because a vector of rows is repeated over them. None may store before all have
    # loaded, or a late one would take the merged lse for the old one.
    tl.debug_barrier()
    tl.store(acc_lse, tl.where(gap == gap, merged_lse, gap), mask=there)
    tl.store(into, merged.to(into.dtype.element_ty), mask=inside)


def merge(
    acc_out: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, into: torch.Tensor
) -> None:
    """`into` becomes the merge of (acc_out, acc_lse) and (out, lse), acc_lse its lse; shapes as in `merge.merge_`.

    acc_out and acc_lse are float32; into is acc_out itself, or leaves acc_out as it is. Last dimensions of acc_out, out
    and into are contiguous.
    """
    batch, length, heads, dim = acc_out.shape
    if not acc_out.numel():
        return
    block_d = triton.next_power_of_2(dim)
    block_rows = 16 if interpreted() else max(1, 4096 // block_d)
    with on_device_of(acc_out):
        _merge[(triton.cdiv(length, block_rows), batch * heads)](
            acc_out, acc_lse, out, lse, into, length, heads,
            *acc_out.stride()[:3], *acc_lse.stride(), *out.stride()[:3], *lse.stride(), *into.stride()[:3],
            DIM=dim, BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
