"""Launch the Triton kernels of attention for one call: programs, strides, results, and what they are compiled for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dfa_megatron.kernels import BlockCall, Partial, Saved
from dfa_megatron.kernels.current_stream import stream_of
from dfa_megatron.kernels.segments import Segments, moved
from dfa_megatron.kernels.triton.adapter import Blocks
from dfa_megatron.kernels.triton.backward import _dk_dv, _dq
from dfa_megatron.kernels.triton.forward import _forward
from dfa_megatron.kernels.triton.support import interpreted, launch, multiprocessors
from dfa_megatron.kernels.triton.tiles import PACKED_COLUMNS
from dfa_megatron.plan.language.geometry import Band

_FAR = 1 << 30
"""A diagonal that no pair reaches, small enough that 32-bit arithmetic on it does not overflow."""

By = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class Diagonals:
    """A band as the kernels read it: row i sees column j when lo <= j - i <= hi, and which of the two can bind."""

    lo: int
    hi: int
    has_lo: bool
    has_hi: bool

    @classmethod
    def of(cls, band: Band, q_len: int, kv_len: int) -> Diagonals:
        """Return the diagonals of a band over so many rows and columns."""
        offset = kv_len - q_len
        lo = -_FAR if band.left < 0 else max(offset - band.left, -_FAR)
        hi = _FAR if band.right < 0 else min(offset + band.right, _FAR)
        return cls(lo, hi, has_lo=lo > 1 - q_len, has_hi=hi < kv_len - 1)


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one kernel for the segments of a call.

    count: programs of one head. diagonals: of the only segment; of several, whether a bound can bind in any of them.
    table: of several segments: int32 (count, PACKED_COLUMNS), first query row, query rows, first key row, key rows,
        lo, hi of the program's segment, and which of its blocks it computes. Programs with much work come first.
    """

    count: int
    diagonals: Diagonals
    table: torch.Tensor | None = None

    @classmethod
    def of(cls, segments: Segments, by: By, block: int, device: torch.device) -> Programs:
        """Return the programs over blocks of that many query rows ("rows") or key rows ("columns")."""
        several = len(segments.parts) > 1  # a single segment has no table on a device
        key = "triton", by, block, device if several else None, stream_of(device) if several else None
        if key not in segments.tables:
            segments.tables[key] = cls._made(segments, by, block, device)
        programs: Programs = segments.tables[key]
        return programs

    @classmethod
    def _made(cls, segments: Segments, by: By, block: int, device: torch.device) -> Programs:
        if len(segments.parts) == 1:
            length = segments.q_len if by == "rows" else segments.kv_len
            return cls(-(-length // block), Diagonals.of(segments.band, segments.q_len, segments.kv_len))
        programs: list[tuple[int, tuple[int, ...]]] = []
        has_lo = has_hi = False
        for s in segments.parts:
            q_len, kv_len = s.q_hi - s.q_lo, s.kv_hi - s.kv_lo
            d = Diagonals.of(s.band, q_len, kv_len)
            has_lo, has_hi = has_lo or d.has_lo, has_hi or d.has_hi
            length, other, lo, hi = (q_len, kv_len, d.lo, d.hi) if by == "rows" else (kv_len, q_len, -d.hi, -d.lo)
            for number, first in enumerate(range(0, length, block)):
                seen = min(other, min(first + block, length) + hi) - max(0, first + lo)
                programs.append((-seen, (s.q_lo, q_len, s.kv_lo, kv_len, d.lo, d.hi, number)))
        flat = [value for _, program in sorted(programs) for value in program]
        table = moved(flat, torch.int32, device).view(-1, PACKED_COLUMNS)
        return cls(len(programs), Diagonals(0, 0, has_lo, has_hi), table)


def constants(call: BlockCall, programs: Programs, blocks: Blocks, *, even: bool) -> dict[str, float]:
    """Return the compile-time arguments and launch options of every kernel.

    even: the blocks of the other side divide its length.
    """
    dim, dim_v = call.q.shape[-1], call.v.shape[-1]
    block_m, block_n, warps, stages = blocks
    return {
        "DIM": dim,
        "DIM_V": dim_v,
        "HAS_LO": programs.diagonals.has_lo,
        "HAS_HI": programs.diagonals.has_hi,
        "EVEN": even and programs.table is None,
        "PACKED": programs.table is not None,
        "CAP": call.softcap,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": _padded(dim),
        "BLOCK_DV": _padded(dim_v),
        "UPCAST": interpreted(),
        "num_warps": warps,
        "num_stages": stages,
    }


def outer_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of every tensor but those of its last dimension."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def heads_of_a_program(group: int, programs: int, wanted: int) -> int:
    """Return how many heads of its group one program sums: all, or a divisor where programs would be too few."""
    share = group
    while programs * (group // share) < 2 * wanted and share > 1:
        share = max(divisor for divisor in range(1, share) if group % divisor == 0)
    return share


def _padded(dim: int) -> int:
    """Return the next power of two, and at least the 16 that a matrix product needs."""
    return max(16, 1 << (dim - 1).bit_length())


def launch_forward(call: BlockCall, blocks: Blocks) -> Partial:
    """Return (out, lse); last dimensions are contiguous, and the batch of several segments is one."""
    (batch, q_len, heads, _), (kv_len, kv_heads, dim_v) = call.q.shape, call.v.shape[1:]
    q, k, v = call.q, call.k, call.v
    out = q.new_empty(batch, q_len, heads, dim_v)
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    programs = Programs.of(call.segments, "rows", blocks[0], q.device)
    if programs.table is not None and not call.segments.is_whole:
        out.zero_()
        lse.fill_(-math.inf)
    launch(
        _forward, (programs.count, heads, batch),
        q, k, v, out, lse, programs.table, call.softmax_scale, q_len, kv_len,
        programs.diagonals.lo, programs.diagonals.hi, heads // kv_heads, *outer_strides(q, k, v, out),
        **constants(call, programs, blocks, even=kv_len % blocks[1] == 0),
    )  # fmt: skip
    return out, lse


def launch_dk_dv(
    call: BlockCall, dout: torch.Tensor, saved: Saved, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dk, dv); last dimensions, lse and minus_delta are contiguous."""
    (batch, q_len, heads, dim), (kv_len, kv_heads, dim_v) = call.q.shape, call.v.shape[1:]
    programs, group = Programs.of(call.segments, "columns", blocks[1], call.q.device), heads // kv_heads
    share = group
    if not call.deterministic:  # else the sum over a group would depend on how many programs there are
        share = heads_of_a_program(group, programs.count * kv_heads * batch, multiprocessors(call.q.device))
    summed = heads // share
    dtype = call.k.dtype if share == group else torch.float32
    dk = _gradient(call, (batch, kv_len, summed, dim), dtype)
    dv = _gradient(call, (batch, kv_len, summed, dim_v), dtype)
    launch(
        _dk_dv, (programs.count, summed, batch),
        call.q, call.k, call.v, dout, saved.lse, saved.minus_delta, dk, dv, programs.table,
        call.softmax_scale, q_len, kv_len, programs.diagonals.lo, programs.diagonals.hi, heads, group, share,
        *outer_strides(call.q, call.k, call.v, dout),
        **constants(call, programs, blocks, even=q_len % blocks[0] == 0),
    )  # fmt: skip
    if share == group:
        return dk, dv
    dk, dv = (x.unflatten(2, (kv_heads, group // share)).sum(3).to(call.k.dtype) for x in (dk, dv))
    return dk, dv


def launch_dq(call: BlockCall, dout: torch.Tensor, saved: Saved, blocks: Blocks) -> torch.Tensor:
    """Return dq; last dimensions, lse and minus_delta are contiguous."""
    (batch, q_len, heads, _), (kv_len, kv_heads) = call.q.shape, call.k.shape[1:3]
    programs = Programs.of(call.segments, "rows", blocks[0], call.q.device)
    dq = _gradient(call, call.q.shape, call.q.dtype)
    launch(
        _dq, (programs.count, heads, batch),
        call.q, call.k, call.v, dout, saved.lse, saved.minus_delta, dq, programs.table,
        call.softmax_scale, q_len, kv_len, programs.diagonals.lo, programs.diagonals.hi, heads // kv_heads,
        *outer_strides(call.q, call.k, call.v, dout),
        **constants(call, programs, blocks, even=kv_len % blocks[1] == 0),
    )  # fmt: skip
    return dq


def _gradient(call: BlockCall, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a gradient, zeroed where rows between segments are written by no kernel."""
    whole = len(call.segments.parts) == 1 or call.segments.is_whole
    return (torch.empty if whole else torch.zeros)(shape, dtype=dtype, device=call.q.device)
