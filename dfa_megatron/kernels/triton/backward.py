"""The backward of a block in Triton, without atomics: a kernel for dk and dv that sums grouped heads, one for dq."""

from __future__ import annotations

import triton
import triton.language as tl

from dfa_megatron.kernels.triton.tiles import (
    LOG2_E,
    SIZES,
    cap_slope,
    capped,
    dot,
    load_lse,
    load_rows,
    segment_of,
    spans,
    visible,
)


@triton.jit
def _merge_rows(
    dk, dv, k_tile, v_tile, q, dout, lse, minus_delta, q_row, dout_row, columns, begin, end,
    q_len, kv_len, lo, hi, scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Add what the query blocks from begin to end give dk (over softmax_scale) and dv; the scores are transposed."""
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    skipped = tl.full((), 0, tl.int64) + begin
    q += skipped * q_row
    dout += skipped * dout_row
    q_offsets = tl.arange(0, BLOCK_M)[:, None] * q_row + dims[None, :]
    dout_offsets = tl.arange(0, BLOCK_M)[:, None] * dout_row + dims_v[None, :]
    for start in tl.range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q + q_offsets, rows, q_len, dims, DIM, MASKED)
        row_lse = load_lse(lse, rows, q_len)
        scores = dot(k_tile, tl.trans(q_tile), tl.zeros((k_tile.shape[0], BLOCK_M), tl.float32), UPCAST)
        if CAP > 0:
            scores, unit = capped(scores, scale, CAP), 1.0
        else:
            unit = scale
        p = tl.math.exp2(scores * unit - row_lse[None, :])
        if MASKED:
            p = tl.where(visible(rows[None, :], columns[:, None], q_len, kv_len, lo, hi, HAS_LO, HAS_HI), p, 0.0)
        dout_tile = load_rows(dout + dout_offsets, rows, q_len, dims_v, DIM_V, MASKED)
        dv = dot(p, dout_tile, dv, UPCAST)
        row_minus_delta = tl.load(minus_delta + rows, mask=rows < q_len, other=0.0)
        dp = dot(v_tile, tl.trans(dout_tile), tl.zeros((v_tile.shape[0], BLOCK_M), tl.float32), UPCAST)
        ds = p * (dp + row_minus_delta[None, :])
        if CAP > 0:
            ds = ds * cap_slope(scores, CAP)
        dk = dot(ds, q_tile, dk, UPCAST)
        q += BLOCK_M * q_row
        dout += BLOCK_M * dout_row
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _dk_dv(
    q, k, v, dout, lse, minus_delta, dk, dv, table, scale, q_len, kv_len, lo, hi,
    heads, group, share,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
    PACKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of one kv head, from `share` heads of its group; dk, dv (batch, kv_len, parts, ...).

    EVEN: BLOCK_M divides q_len. PACKED: of the segment in its table.
    """
    first = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    all_rows = q_len
    all_columns = kv_len
    if PACKED:
        q_start, q_len, kv_start, kv_len, lo, hi, block = segment_of(table)
        first = block * BLOCK_N
        q += q_start * q_row
        dout += q_start * dout_row
        lse += q_start
        minus_delta += q_start
        k += kv_start * k_row
        v += kv_start * v_row
        dk += kv_start * tl.num_programs(1) * DIM
        dv += kv_start * tl.num_programs(1) * DIM_V
    batch = tl.program_id(2).to(tl.int64)
    first_head = part * share
    kv_head = (first_head // group).to(tl.int64)
    columns = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    wide = columns.to(tl.int64)[:, None]
    k_tile = load_rows(
        k + batch * k_batch + kv_head * k_head + wide * k_row + dims[None, :], columns, kv_len, dims, DIM, True
    )
    v_tile = load_rows(
        v + batch * v_batch + kv_head * v_head + wide * v_row + dims_v[None, :], columns, kv_len, dims_v, DIM_V, True
    )
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    last = tl.minimum(first + BLOCK_N, kv_len) - 1
    begin, full_begin, full_end, end = spans(first, last, q_len, -hi, -lo, HAS_HI, HAS_LO, BLOCK_M)
    for head in range(first_head, first_head + share):
        wide_head = tl.full((), 0, tl.int64) + head
        head_q = q + batch * q_batch + wide_head * q_head
        head_dout = dout + batch * dout_batch + wide_head * dout_head
        head_lse = lse + (batch * heads + head) * all_rows
        head_minus_delta = minus_delta + (batch * heads + head) * all_rows
        for third in tl.static_range(3):  # the rows that see some keys, those that see all, and some keys again
            lower = begin if third == 0 else full_begin if third == 1 else full_end
            upper = full_begin if third == 0 else full_end if third == 1 else end
            if third == 1 or (HAS_HI if third == 0 else (HAS_LO or not EVEN)):
                dk_tile, dv_tile = _merge_rows(
                    dk_tile, dv_tile, k_tile, v_tile, head_q, head_dout, head_lse, head_minus_delta, q_row, dout_row,
                    columns, lower, upper, q_len, kv_len, lo, hi, scale * LOG2_E,
                    DIM, DIM_V, HAS_LO, HAS_HI, BLOCK_M, BLOCK_D, BLOCK_DV, third != 1, UPCAST, CAP,
                )  # fmt: skip
    place = ((batch * all_columns + wide) * tl.num_programs(1)) + part
    there = (columns < kv_len)[:, None]
    dk_tile = (dk_tile * scale).to(dk.dtype.element_ty)
    tl.store(dk + place * DIM + dims[None, :], dk_tile, mask=there & (dims < DIM)[None, :])
    tl.store(
        dv + place * DIM_V + dims_v[None, :], dv_tile.to(dv.dtype.element_ty), mask=there & (dims_v < DIM_V)[None, :]
    )


@triton.jit
def _merge_columns(
    dq, q_tile, dout_tile, row_lse, row_minus_delta, k, v, k_row, v_row, rows, begin, end,
    q_len, kv_len, lo, hi, scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Add what the key blocks from begin to end give dq (over softmax_scale)."""
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
        v_tile = load_rows(v + v_offsets, columns, kv_len, dims_v, DIM_V, MASKED)
        scores = dot(q_tile, tl.trans(k_tile), tl.zeros((q_tile.shape[0], BLOCK_N), tl.float32), UPCAST)
        dp = dot(dout_tile, tl.trans(v_tile), tl.zeros((q_tile.shape[0], BLOCK_N), tl.float32), UPCAST)
        if CAP > 0:
            scores, unit = capped(scores, scale, CAP), 1.0
        else:
            unit = scale
        p = tl.math.exp2(scores * unit - row_lse[:, None])
        if MASKED:
            p = tl.where(visible(rows[:, None], columns[None, :], q_len, kv_len, lo, hi, HAS_LO, HAS_HI), p, 0.0)
        ds = p * (dp + row_minus_delta[:, None])
        if CAP > 0:
            ds = ds * cap_slope(scores, CAP)
        dq = dot(ds, k_tile, dq, UPCAST)
        k += BLOCK_N * k_row
        v += BLOCK_N * v_row
    return dq


@triton.jit(do_not_specialize=SIZES)
def _dq(
    q, k, v, dout, lse, minus_delta, dq, table, scale, q_len, kv_len, lo, hi, group,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
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
        dout += q_start * dout_row
        lse += q_start
        minus_delta += q_start
        k += kv_start * k_row
        v += kv_start * v_row
        dq += q_start * tl.num_programs(1) * DIM
    elif HAS_HI:
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    kv_head = head // group
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    wide = rows.to(tl.int64)[:, None]
    q_tile = load_rows(q + batch * q_batch + head * q_head + wide * q_row + dims[None, :], rows, q_len, dims, DIM, True)
    dout_pointers = dout + batch * dout_batch + head * dout_head + wide * dout_row + dims_v[None, :]
    dout_tile = load_rows(dout_pointers, rows, q_len, dims_v, DIM_V, True)
    place = batch * tl.num_programs(1) + head
    row_lse = load_lse(lse + place * all_rows, rows, q_len)
    row_minus_delta = tl.load(minus_delta + place * all_rows + rows, mask=rows < q_len, other=0.0)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    last = tl.minimum(first + BLOCK_M, q_len) - 1
    begin, full_begin, full_end, end = spans(first, last, kv_len, lo, hi, HAS_LO, HAS_HI, BLOCK_N)
    for third in tl.static_range(3):
        lower = begin if third == 0 else full_begin if third == 1 else full_end
        upper = full_begin if third == 0 else full_end if third == 1 else end
        if third == 1 or (HAS_LO if third == 0 else (HAS_HI or not EVEN)):
            dq_tile = _merge_columns(
                dq_tile, q_tile, dout_tile, row_lse, row_minus_delta, k, v, k_row, v_row, rows,
                lower, upper, q_len, kv_len, lo, hi, scale * LOG2_E,
                DIM, DIM_V, HAS_LO, HAS_HI, BLOCK_N, BLOCK_D, BLOCK_DV, third != 1, UPCAST, CAP,
            )  # fmt: skip
    place = (batch * all_rows + wide) * tl.num_programs(1) + head
    dq_tile = (dq_tile * scale).to(dq.dtype.element_ty)
    tl.store(dq + place * DIM + dims[None, :], dq_tile, mask=(rows < q_len)[:, None] & (dims < DIM)[None, :])
