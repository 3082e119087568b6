"""Learned-sparse attention in Triton: scores of an indexer, and attention of each query over keys of its own.

A program of attention has one query row and some heads of it, and reads the chosen keys where they lie. Gradients of
keys are added by atomics, in float32, in any order. Numbers of a key behind `DIM_A`, a power of two, come by
themselves: a latent of 576 is 512 and 64, and its values are the 512.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.adapters import cudnn_sparse
from dfa_megatron.kernels.triton.support import interpreted, large_shared_memory, launch, on_device_of, with_unit_stride
from dfa_megatron.kernels.triton.tiles import LN_2, LOG2_E, dot


@triton.jit(do_not_specialize=("begin", "rows", "keys"))
def _scores(
    q, k, weights, first, last, out, begin, rows, keys, heads, q_row, q_head, k_row, w_row, out_row,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows with BLOCK_N keys from begin on; -inf where a row does not see a key."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    lowest = tl.load(first + row, mask=row < rows, other=2147483647)
    highest = tl.load(last + row, mask=row < rows, other=-1)
    column = begin + place
    seen = (column[None, :] >= lowest[:, None]) & (column[None, :] <= highest[:, None])
    inside = (row < rows)[:, None] & (place < keys)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    start = begin + tl.program_id(1) * BLOCK_N
    if (tl.max(highest, 0) >= start) & (tl.min(lowest, 0) < start + BLOCK_N):
        k_at = k + column.to(tl.int64)[:, None] * k_row + dims[None, :]
        k_tile = tl.load(k_at, mask=(place < keys)[:, None] & (dims < DIM)[None, :], other=0.0)
        q_at = q + row.to(tl.int64)[:, None] * q_row + dims[None, :]
        for head in range(heads):
            q_tile = tl.load(q_at + head * q_head, mask=(row < rows)[:, None] & (dims < DIM)[None, :], other=0.0)
            products = dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
            w = tl.load(weights + row.to(tl.int64) * w_row + head, mask=row < rows, other=0.0).to(tl.float32)
            total += w[:, None] * tl.maximum(products, 0.0)
    total = tl.where(seen, total + 0.0, -float("inf"))
    tl.store(out + row.to(tl.int64)[:, None] * out_row + place[None, :], total, mask=inside)


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    sees: tuple[torch.Tensor, torch.Tensor],
    begin: int,
    end: int,
) -> torch.Tensor:
    """Return scores (rows, end - begin), float32, of queries with the keys from begin to end.

    q: (rows, heads, dim). k: (tokens, dim). weights: (rows, heads). sees: int32 (rows,) each, the first key that a row
    sees and the last.
    """
    (rows, heads, dim), keys = q.shape, end - begin
    q, k, weights = (with_unit_stride(x) for x in (q, k, weights))
    out = q.new_empty(rows, keys, dtype=torch.float32)
    if out.numel():
        grid = triton.cdiv(rows, 64), triton.cdiv(keys, 128)
        strides = q.stride(0), q.stride(1), k.stride(0), weights.stride(0), out.stride(0)
        block = max(16, triton.next_power_of_2(dim))
        with on_device_of(q):
            launch(
                _scores, grid, q, k, weights, *sees, out, begin, rows, keys, heads, *strides,
                DIM=dim, BLOCK_M=64, BLOCK_N=128, BLOCK_D=block, UPCAST=interpreted(), num_warps=8,
            )  # fmt: skip
    return out


def best(found: torch.Tensor, begin: int, topk: int) -> torch.Tensor:
    """Return the positions (rows, topk) of the highest scores, int32, the lowest of equal ones first; -1 for -inf.

    cuDNN takes the lowest of equal scores. PyTorch does not say which it takes where not all of the lowest scores fit:
    in such rows the choice is made again.
    """
    count = min(topk, found.shape[1])
    at = cudnn_sparse.best_places(found, count)
    if at is None:
        values, at = found.topk(count, dim=1)
        lowest = values[:, -1:]
        fit = (found == lowest).sum(1) == (values == lowest).sum(1)
        if len(again := (~fit & (lowest[:, 0] > -math.inf)).nonzero()[:, 0]):
            at[again] = _ordered(found[again], torch.arange(found.shape[1], device=found.device), count)
    places = _ordered(found.gather(1, at), at, count)
    return (begin + places).int().masked_fill_(found.gather(1, places) == -math.inf, -1)


def _ordered(found: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the highest scores, int64, in order: a score and its place make one integer."""
    bits = found.view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    return 0xFFFFFFFF - ((keys | (0xFFFFFFFF - places)).topk(count, dim=1).values & 0xFFFFFFFF)


@triton.jit
def part_of(at, ok, dims, DIM: tl.constexpr):
    """Numbers of keys, (keys, dims), 0 where there is no key."""
    return tl.load(at[:, None] + dims[None, :], mask=ok[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=("topk",))
def _attend(
    q, kv, chosen, out, lse, group, topk, scale, q_row, q_head, kv_row, kv_head, chosen_row, out_row, out_head, lse_row,
    DIM_A: tl.constexpr, BLOCK_A: tl.constexpr, DIM_B: tl.constexpr, BLOCK_B: tl.constexpr, FIRST_V: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, SAME: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a row, and BLOCK_H heads of one kv head."""
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = tl.program_id(2) * group + own
    dims_a, dims_b, dims_v = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_V)
    q_at = q + row * q_row + heads.to(tl.int64) * q_head
    q_a, q_b = part_of(q_at, own < group, dims_a, DIM_A), part_of(q_at + DIM_A, own < group, dims_b, DIM_B)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    peak = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, topk, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        key = tl.load(chosen + row * chosen_row + place, mask=place < topk, other=-1)
        ok = key >= 0
        at = kv + key.to(tl.int64) * kv_row + tl.program_id(2) * kv_head
        k_a = part_of(at, ok, dims_a, DIM_A)
        products = dot(q_a, tl.trans(k_a), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), UPCAST)
        if DIM_B > 0:
            products = dot(q_b, tl.trans(part_of(at + DIM_A, ok, dims_b, DIM_B)), products, UPCAST)
        products = tl.where(ok[None, :], products * (scale * LOG2_E), -float("inf"))
        higher = tl.maximum(peak, tl.max(products, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf would be NaN
        p = tl.math.exp2(products - shift[:, None])
        decay = tl.math.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        v = k_a if SAME else part_of(at + FIRST_V, ok, dims_v, DIM_V)
        acc = dot(p, v, acc * decay[:, None], UPCAST)
        peak = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out + row * out_row + heads.to(tl.int64)[:, None] * out_head + dims_v[None, :]
    tl.store(out_at, acc, mask=(own < group)[:, None] & (dims_v < DIM_V)[None, :])
    tl.store(lse + row * lse_row + heads, (peak + tl.math.log2(total)) * LN_2, mask=own < group)


@triton.jit(do_not_specialize=("topk",))
def _gradients(
    q, kv, chosen, dout, lse, delta, dq, dkv, group, topk, scale, q_row, q_head, kv_row, kv_head, chosen_row,
    dout_row, dout_head, lse_row, dq_row, dq_head, dkv_row, dkv_head,
    DIM_A: tl.constexpr, BLOCK_A: tl.constexpr, DIM_B: tl.constexpr, BLOCK_B: tl.constexpr, FIRST_V: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, SAME: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a row, and BLOCK_H heads of one kv head. delta: -rowsum(dout * out)."""
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = tl.program_id(2) * group + own
    dims_a, dims_b, dims_v = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_V)
    q_at, above_at = q + row * q_row + heads * q_head, dout + row * dout_row + heads * dout_head
    q_a, q_b = part_of(q_at, own < group, dims_a, DIM_A), part_of(q_at + DIM_A, own < group, dims_b, DIM_B)
    above = part_of(above_at, own < group, dims_v, DIM_V)
    base = tl.load(lse + row * lse_row + heads, mask=own < group, other=float("inf")) * LOG2_E
    base = tl.where(base == -float("inf"), float("inf"), base)
    minus = tl.load(delta + row * lse_row + heads, mask=own < group, other=0.0)
    dq_a, dq_b = tl.zeros((BLOCK_H, BLOCK_A), tl.float32), tl.zeros((BLOCK_H, BLOCK_B), tl.float32)
    for start in range(0, topk, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        key = tl.load(chosen + row * chosen_row + place, mask=place < topk, other=-1)
        ok = key >= 0
        at = kv + key.to(tl.int64) * kv_row + tl.program_id(2) * kv_head
        k_a = part_of(at, ok, dims_a, DIM_A)
        k_b = part_of(at + DIM_A, ok, dims_b, DIM_B)
        products = dot(q_a, tl.trans(k_a), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), UPCAST)
        if DIM_B > 0:
            products = dot(q_b, tl.trans(k_b), products, UPCAST)
        p = tl.math.exp2(products * (scale * LOG2_E) - base[:, None])
        p = tl.where(ok[None, :], p, 0.0)
        v = k_a if SAME else part_of(at + FIRST_V, ok, dims_v, DIM_V)
        dp = dot(above, tl.trans(v), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), UPCAST)
        ds = p * (dp + minus[:, None]) * scale
        dq_a = dot(ds, k_a, dq_a, UPCAST)
        into = dkv + key.to(tl.int64) * dkv_row + tl.program_id(2) * dkv_head
        dk = dot(tl.trans(ds), q_a, tl.zeros((BLOCK_N, BLOCK_A), tl.float32), UPCAST)
        if SAME:
            dk = dot(tl.trans(p), above, dk, UPCAST)
        else:
            dv = dot(tl.trans(p), above, tl.zeros((BLOCK_N, BLOCK_V), tl.float32), UPCAST)
            some = ok[:, None] & (dims_v < DIM_V)[None, :]
            tl.atomic_add(into[:, None] + FIRST_V + dims_v[None, :], dv, mask=some, sem="relaxed")
        some = ok[:, None] & (dims_a < DIM_A)[None, :]
        tl.atomic_add(into[:, None] + dims_a[None, :], dk, mask=some, sem="relaxed")
        if DIM_B > 0:
            dq_b = dot(ds, k_b, dq_b, UPCAST)
            dk_b = dot(tl.trans(ds), q_b, tl.zeros((BLOCK_N, BLOCK_B), tl.float32), UPCAST)
            some = ok[:, None] & (dims_b < DIM_B)[None, :]
            tl.atomic_add(into[:, None] + DIM_A + dims_b[None, :], dk_b, mask=some, sem="relaxed")
    dq_at = dq + row * dq_row + heads.to(tl.int64)[:, None] * dq_head
    tl.store(dq_at + dims_a[None, :], dq_a, mask=(own < group)[:, None] & (dims_a < DIM_A)[None, :])
    tl.store(dq_at + DIM_A + dims_b[None, :], dq_b, mask=(own < group)[:, None] & (dims_b < DIM_B)[None, :])


def attend(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, scale: float, values: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (rows, heads, head_dim_v) and lse (rows, heads), float32, as `indexed.chosen.attend` does."""
    (rows, heads, _), kv_heads = q.shape, kv.shape[1]
    q, kv, chosen = (with_unit_stride(x) for x in (q, kv, chosen))
    out = q.new_empty(rows, heads, values[1] - values[0], dtype=torch.float32)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows:
        sizes, grid = _sizes(q, kv, values)
        strides = *q.stride()[:2], *kv.stride()[:2], chosen.stride(0), *out.stride()[:2], lse.stride(0)
        with on_device_of(q):
            launch(_attend, grid, q, kv, chosen, out, lse, heads // kv_heads, chosen.shape[1], scale, *strides, **sizes)
    return out, lse


def gradients(
    dout: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    statistics: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    values: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq and dkv, float32, as `indexed.chosen.gradients` does.

    statistics: lse, and -rowsum(dout * out), (rows, heads).
    """
    q, kv, chosen, dout = (with_unit_stride(x) for x in (*inputs, dout))
    lse, delta = (x.contiguous() for x in statistics)
    dq, dkv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, kv))
    if len(q):
        sizes, grid = _sizes(q, kv, values, backward=True)
        strides = *q.stride()[:2], *kv.stride()[:2], chosen.stride(0), *dout.stride()[:2], lse.stride(0)
        strides += *dq.stride()[:2], *dkv.stride()[:2]
        numbers = q.shape[1] // kv.shape[1], chosen.shape[1], scale
        with on_device_of(q):
            launch(_gradients, grid, q, kv, chosen, dout, lse, delta, dq, dkv, *numbers, *strides, **sizes)
    return dq, dkv


def _sizes(
    q: torch.Tensor, kv: torch.Tensor, values: tuple[int, int], *, backward: bool = False
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Return the constants of a launch, and its grid; blocks of latents were the fastest of 14 on an H200."""
    dim, (first, end), group = q.shape[2], values, q.shape[1] // kv.shape[1]
    (of_a, block_a), (of_b, block_b) = parts_of(dim)
    heads, keys, warps, stages = 32 if group > 16 and dim <= 256 else 16, 32, 4, 2
    if dim > 256 and q.is_cuda and large_shared_memory(q.device):
        heads = max(16, min(32 if backward else 64, triton.next_power_of_2(group)))
        keys, warps, stages = (32, 8, 1) if backward else (64, 4 if heads == 16 else 8, 2)
    elif dim > 256:
        warps, stages = 8, 1
    sizes: dict[str, Any] = {
        "DIM_A": of_a, "BLOCK_A": block_a, "DIM_B": of_b, "BLOCK_B": block_b, "FIRST_V": first, "DIM_V": end - first,
        "BLOCK_V": max(16, triton.next_power_of_2(end - first)), "SAME": first == 0 and end == of_a,
        "BLOCK_H": heads, "BLOCK_N": keys, "UPCAST": interpreted(), "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return sizes, (len(q), triton.cdiv(group, heads), kv.shape[1])


def parts_of(dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two parts of a key's numbers, each with the power of two that holds it."""
    of_a = 1 << (dim.bit_length() - 1) if dim > 16 else dim
    of_b = dim - of_a
    return (of_a, max(16, of_a)), (of_b, max(16, triton.next_power_of_2(of_b)))
