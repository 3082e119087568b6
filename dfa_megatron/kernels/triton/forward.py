"""The forward of a block in Triton: online softmax over the key blocks that a band lets a query block see."""

from __future__ import annotations

import triton
import triton.language as tl

from dfa_megatron.kernels.triton.tiles import (
    LN_2,
    LOG2_E,
    SIZES,
    capped,
    dot,
    load_rows,
    segment_of,
    spans,
    visible,
)


@triton.jit
def _merge_parts(
    acc, total, peak, q, k, v, k_row, v_row, rows, begin, end, q_len, kv_len, lo, hi, scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Merge the key blocks from begin to end into (acc, total, peak); scale is in units of log 2, and not negative.

    CAP: of the scores, 0 for none.
    """
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    skipped = tl.full((), 0, tl.int64) + begin
    k += skipped * k_row
    v += skipped * v_row
    k_offsets = tl.arange(0, BLOCK_N)[:, None] * k_row + dims[None, :]
    v_offsets = tl.arange(0, BLOCK_N)[:, None] * v_row + dims_v[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k + k_offsets, columns, kv_len, dims, DIM, MASKED)
        scores = dot(q, tl.trans(k_tile), tl.zeros((q.shape[0], BLOCK_N), tl.float32), UPCAST)
        if CAP > 0:
            scores, unit = capped(scores, scale, CAP), 1.0
        else:
            unit = scale
        if MASKED:
            seen = visible(rows[:, None], columns[None, :], q_len, kv_len, lo, hi, HAS_LO, HAS_HI)
            scores = tl.where(seen, scores * unit, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf - -inf would be NaN
            p = tl.math.exp2(scores - shift[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
            shift = new_peak
            p = tl.math.exp2(scores * unit - shift[:, None])
        decay = tl.math.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        v_tile = load_rows(v + v_offsets, columns, kv_len, dims_v, DIM_V, MASKED)
        acc = dot(p, v_tile, acc * decay[:, None], UPCAST)
        peak = new_peak
        k += BLOCK_N * k_row
        v += BLOCK_N * v_row
    return acc, total, peak


@triton.jit(do_not_specialize=SIZES)
def _forward(
    q, k, v, out, lse, table, scale, q_len, kv_len, lo, hi, group,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
    PACKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. EVEN: BLOCK_N divides kv_len. PACKED: of the segment in its table."""
    block = tl.program_id(0)
    all_rows = q_len
    if PACKED:
        q_start, q_len, kv_start, kv_len, lo, hi, block = segment_of(table)
        q += q_start * q_row
        k += kv_start * k_row
        v += kv_start * v_row
        out += q_start * out_row
        lse += q_start
    elif HAS_HI:
        block = tl.num_programs(0) - 1 - block  # the rows that see most first, so that none of them is last
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    kv_head = (head // group).to(tl.int64)
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q += batch * q_batch + head.to(tl.int64) * q_head
    q_tile = load_rows(q + rows.to(tl.int64)[:, None] * q_row + dims[None, :], rows, q_len, dims, DIM, True)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    scale = scale * LOG2_E
    last = tl.minimum(first + BLOCK_M, q_len) - 1
    begin, full_begin, full_end, end = spans(first, last, kv_len, lo, hi, HAS_LO, HAS_HI, BLOCK_N)
    for third in tl.static_range(3):  # the keys that some rows see, those that all rows see, and some rows again
        lower = begin if third == 0 else full_begin if third == 1 else full_end
        upper = full_begin if third == 0 else full_end if third == 1 else end
        if third == 1 or (HAS_LO if third == 0 else (HAS_HI or not EVEN)):
            acc, total, peak = _merge_parts(
                acc, total, peak, q_tile, k, v, k_row, v_row, rows, lower, upper,
                q_len, kv_len, lo, hi, scale,
                DIM, DIM_V, HAS_LO, HAS_HI, BLOCK_N, BLOCK_D, BLOCK_DV, third != 1, UPCAST, CAP,
            )  # fmt: skip
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    acc = acc / total[:, None]
    row_lse = tl.where(blind, -float("inf"), (peak + tl.math.log2(total)) * LN_2)
    out += batch * out_batch + head.to(tl.int64) * out_head
    out_pointers = out + rows.to(tl.int64)[:, None] * out_row + dims_v[None, :]
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=(rows < q_len)[:, None] & (dims_v < DIM_V)[None, :])
    tl.store(lse + (batch * tl.num_programs(1) + head) * all_rows + rows, row_lse, mask=rows < q_len)
