"""The loss of an indexer over chosen keys in Triton: what is compared for each row, and gradients of the scores.

A row reads keys of its own where they lie. Numbers of a key come in two parts, as in `sparse`. Gradients of index keys
are added by atomics, in float32, in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.triton.sparse import part_of, parts_of
from dfa_megatron.kernels.triton.support import interpreted, launch, on_device_of, with_unit_stride
from dfa_megatron.kernels.triton.tiles import LOG2_E, dot


@triton.jit(do_not_specialize=("topk",))
def _scored(
    index_q, index_k, weights, q, kv, lse, chosen, teacher, scores, index_heads, kv_heads, group, topk, scale,
    index_row, index_head, near_row, weight_row, q_row, q_head, kv_row, kv_head, lse_row, chosen_row, out_row,
    DIM_I: tl.constexpr, BLOCK_I: tl.constexpr, DIM_A: tl.constexpr, BLOCK_A: tl.constexpr, DIM_B: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N chosen keys of a row."""
    row, heads = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = tl.load(chosen + row * chosen_row + place, mask=place < topk, other=-1).to(tl.int64)
    ok = key >= 0
    dims_i, dims_a, dims_b = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    near = part_of(index_k + key * near_row, ok, dims_i, DIM_I)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, index_heads, BLOCK_H):
        own = first + heads
        tile = part_of(index_q + row * index_row + own * index_head, own < index_heads, dims_i, DIM_I)
        products = dot(tile, tl.trans(near), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), UPCAST)
        w = tl.load(weights + row * weight_row + own, mask=own < index_heads, other=0.0).to(tl.float32)
        total += tl.sum(w[:, None] * tl.maximum(products, 0.0), 0)
    tl.store(scores + row * out_row + place, tl.where(ok, total, -float("inf")), mask=place < topk)
    found = tl.zeros((BLOCK_N,), tl.float32)
    for of_kv in range(kv_heads):
        at = kv + key * kv_row + of_kv * kv_head
        k_a = part_of(at, ok, dims_a, DIM_A)
        k_b = part_of(at + DIM_A, ok, dims_b, DIM_B)
        for first in range(0, group, BLOCK_H):
            own = first + heads
            head = of_kv * group + own
            q_at = q + row * q_row + head * q_head
            q_a = part_of(q_at, own < group, dims_a, DIM_A)
            products = dot(q_a, tl.trans(k_a), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), UPCAST)
            if DIM_B > 0:
                products = dot(part_of(q_at + DIM_A, own < group, dims_b, DIM_B), tl.trans(k_b), products, UPCAST)
            base = tl.load(lse + row * lse_row + head, mask=own < group, other=float("inf")) * LOG2_E
            base = tl.where(base == -float("inf"), float("inf"), base)
            found += tl.sum(tl.math.exp2(products * (scale * LOG2_E) - base[:, None]), 0)
    tl.store(teacher + row * out_row + place, tl.where(ok, found, 0.0), mask=place < topk)


@triton.jit(do_not_specialize=("topk",))
def _score_gradients(
    index_q, index_k, weights, chosen, dscores, dq, dw, dk, heads, topk,
    q_row, q_head, k_row, w_row, chosen_row, dscores_row, dq_row, dq_head, dw_row, dk_row,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a row, and BLOCK_H heads."""
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    tile = part_of(index_q + row * q_row + own * q_head, own < heads, dims, DIM)
    w = tl.load(weights + row * w_row + own, mask=own < heads, other=0.0).to(tl.float32)
    acc, acc_w = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, topk, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        key = tl.load(chosen + row * chosen_row + place, mask=place < topk, other=-1).to(tl.int64)
        ds = tl.load(dscores + row * dscores_row + place, mask=place < topk, other=0.0)
        near = part_of(index_k + key * k_row, key >= 0, dims, DIM)
        products = dot(tile, tl.trans(near), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), UPCAST)
        acc_w += tl.sum(tl.maximum(products, 0.0) * ds[None, :], 1)
        d = tl.where(products > 0.0, w[:, None] * ds[None, :], 0.0)
        acc = dot(d, near, acc, UPCAST)
        added = dot(tl.trans(d), tile, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), UPCAST)
        into = dk + key[:, None] * dk_row + dims[None, :]
        tl.atomic_add(into, added, mask=(key >= 0)[:, None] & (dims < DIM)[None, :], sem="relaxed")
    dq_at = dq + row * dq_row + own[:, None] * dq_head + dims[None, :]
    tl.store(dq_at, acc, mask=(own < heads)[:, None] & (dims < DIM)[None, :])
    tl.store(dw + row * dw_row + own, acc_w, mask=own < heads)


Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""index_q (rows, heads, dim), index_k (tokens, dim), weights (rows, heads)."""


def scored(
    index: Index, attention: tuple[torch.Tensor, torch.Tensor, torch.Tensor], chosen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's probabilities summed over heads, and the indexer's scores, (rows, topk), float32.

    attention: q (rows, heads, dim), kv (tokens, kv_heads, dim or more), lse (rows, heads), float32. Without a key a
    probability is 0 and a score -inf.
    """
    (index_q, index_k, weights), (q, kv, lse) = (tuple(map(with_unit_stride, x)) for x in (index, attention))
    chosen = with_unit_stride(chosen)
    teacher, scores = (q.new_empty(chosen.shape, dtype=torch.float32) for _ in range(2))
    if chosen.numel():
        (of_a, block_a), (of_b, block_b) = parts_of(q.shape[2])
        counts = index_q.shape[1], kv.shape[1], q.shape[1] // kv.shape[1], chosen.shape[1], scale
        strides = *index_q.stride()[:2], index_k.stride(0), weights.stride(0), *q.stride()[:2], *kv.stride()[:2]
        large = of_a > 256
        with on_device_of(q):
            launch(
                _scored, (len(q), triton.cdiv(chosen.shape[1], 64)), index_q, index_k, weights, q, kv, lse, chosen,
                teacher, scores, *counts, *strides, lse.stride(0), chosen.stride(0), teacher.stride(0),
                DIM_I=index_q.shape[2], BLOCK_I=max(16, triton.next_power_of_2(index_q.shape[2])),
                DIM_A=of_a, BLOCK_A=block_a, DIM_B=of_b, BLOCK_B=block_b, BLOCK_H=32 if large else 64, BLOCK_N=64,
                UPCAST=interpreted(), num_warps=4, num_stages=1 if large else 2,
            )  # fmt: skip
    return teacher, scores


def add_gradients(index: Index, chosen: torch.Tensor, dscores: torch.Tensor, into: Index) -> None:
    """Write gradients of the rows' index_q and weights, and add those of index_k; all into float32."""
    index_q, index_k, weights = map(with_unit_stride, index)
    chosen, dscores, (dq, dk, dw) = with_unit_stride(chosen), with_unit_stride(dscores), into
    (rows, heads, dim), block = index_q.shape, max(16, triton.next_power_of_2(index_q.shape[2]))
    if rows:
        strides = *index_q.stride()[:2], index_k.stride(0), weights.stride(0), chosen.stride(0), dscores.stride(0)
        strides += *dq.stride()[:2], dw.stride(0), dk.stride(0)
        with on_device_of(index_q):
            launch(
                _score_gradients, (rows, triton.cdiv(heads, 64)), index_q, index_k, weights, chosen, dscores, dq, dw,
                dk, heads, chosen.shape[1], *strides, DIM=dim, BLOCK_D=block, BLOCK_H=64, BLOCK_N=64,
                UPCAST=interpreted(), num_warps=4, num_stages=1,
            )  # fmt: skip
