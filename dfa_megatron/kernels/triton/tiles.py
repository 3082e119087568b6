"""The common parts of the Triton kernels of attention: loads, matrix products, bands, and capped scores."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

SIZES = ("q_len", "kv_len", "lo", "hi", "heads", "group", "share")
"""Arguments whose values compile no new kernel: a training run meets many lengths and offsets."""


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32, a rounded to b's dtype first; float32 operands are split in two TF32 parts each.

    UPCAST is for the interpreter, which multiplies bfloat16 as if its bits were integers.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a.to(b.dtype), b, acc, input_precision="tf32x3")


@triton.jit
def load_rows(pointers, rows, length, dims, DIM: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """A block of rows, 0 where a row is past length or a column past DIM; unchecked where neither can be."""
    if dims.shape[0] == DIM:
        if CHECK_ROWS:
            return tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
        return tl.load(pointers)
    if CHECK_ROWS:
        return tl.load(pointers, mask=(rows < length)[:, None] & (dims < DIM)[None, :], other=0.0)
    return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def load_lse(lse, rows, q_len):
    """The lse of some rows in units of log 2; +inf, which makes every probability 0, where a row is none or blind."""
    row_lse = tl.load(lse + rows, mask=rows < q_len, other=float("inf"))
    return tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2_E)


@triton.jit
def visible(rows, columns, q_len, kv_len, lo, hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Which pairs of broadcastable rows and columns exist and lie inside the band."""
    seen = (rows < q_len) & (columns < kv_len)
    if HAS_LO:
        seen = seen & (columns - rows >= lo)
    if HAS_HI:
        seen = seen & (columns - rows <= hi)
    return seen


@triton.jit
def capped(scores, scale, CAP: tl.constexpr):
    """CAP * tanh(scores * scale / CAP), scale and result in units of log 2; nothing cancels where scores are small."""
    x = scores * (scale / (CAP * LOG2_E))
    square = x * x
    small = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    decay = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.0225, small, tl.where(x < 0, -large, large)) * (CAP * LOG2_E)


@triton.jit
def cap_slope(scores, CAP: tl.constexpr):
    """What a capped score, in units of log 2, changes by where the score does: 1 - tanh^2."""
    share = scores / (CAP * LOG2_E)
    return 1.0 - share * share


@triton.jit
def spans(first, last, length, lo, hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BLOCK: tl.constexpr):
    """What positions first..last see of 0..length: (begin, full_begin, full_end, end), multiples of BLOCK but for end.

    Position p sees p + lo .. p + hi. All of them see the blocks from full_begin to full_end whole; of the blocks before
    and after, each sees a part or nothing. begin <= full_begin <= full_end <= end always.
    """
    begin = 0
    end = length
    full_begin = 0
    full_end = length
    if HAS_LO:
        begin = tl.maximum(first + lo, 0)
        full_begin = tl.maximum(last + lo, 0)
    if HAS_HI:
        end = tl.maximum(tl.minimum(last + hi + 1, length), 0)
        full_end = tl.maximum(tl.minimum(first + hi + 1, length), 0)
    begin = tl.minimum(begin, end) // BLOCK * BLOCK
    full_end = full_end // BLOCK * BLOCK
    full_begin = tl.minimum((full_begin + BLOCK - 1) // BLOCK * BLOCK, end)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


PACKED_COLUMNS = 7
COLUMNS = tl.constexpr(PACKED_COLUMNS)


@triton.jit
def segment_of(table):
    """(first query row, query rows, first key row, key rows, lo, hi, block) of this program, which packs segments."""
    table += tl.program_id(0) * COLUMNS
    q_start = tl.load(table).to(tl.int64)
    kv_start = tl.load(table + 2).to(tl.int64)
    lo = tl.load(table + 4)
    hi = tl.load(table + 5)
    return q_start, tl.load(table + 1), kv_start, tl.load(table + 3), lo, hi, tl.load(table + 6)
