"""Launch the Triton kernels of attention for one call: allocate results, count programs, pass strides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dfa_megatron.kernels.api import BlockCall, Partial, Saved
from dfa_megatron.kernels.triton.backward import _dk_dv, _dq
from dfa_megatron.kernels.triton.call import (
    Blocks,
    Programs,
    alibi_pointers,
    constants,
    heads_of_a_program,
    outer_strides,
)
from dfa_megatron.kernels.triton.forward import _forward
from dfa_megatron.kernels.triton.support import launch, multiprocessors


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
        q, k, v, out, lse, programs.table, *alibi_pointers(call), call.softmax_scale, q_len, kv_len,
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
    share = heads_of_a_program(group, programs.count * kv_heads * batch, multiprocessors(call.q.device))
    summed = heads // share
    dtype = call.k.dtype if share == group else torch.float32
    dk = _gradient(call, (batch, kv_len, summed, dim), dtype)
    dv = _gradient(call, (batch, kv_len, summed, dim_v), dtype)
    launch(
        _dk_dv, (programs.count, summed, batch),
        call.q, call.k, call.v, dout, saved.lse, saved.minus_delta, dk, dv, programs.table, *alibi_pointers(call),
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
        call.q, call.k, call.v, dout, saved.lse, saved.minus_delta, dq, programs.table, *alibi_pointers(call),
        call.softmax_scale, q_len, kv_len, programs.diagonals.lo, programs.diagonals.hi, heads // kv_heads,
        *outer_strides(call.q, call.k, call.v, dout),
        **constants(call, programs, blocks, even=kv_len % blocks[1] == 0),
    )  # fmt: skip
    return dq


def _gradient(call: BlockCall, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a gradient, zeroed where rows between segments are written by no kernel."""
    whole = len(call.segments.parts) == 1 or call.segments.is_whole
    return (torch.empty if whole else torch.zeros)(shape, dtype=dtype, device=call.q.device)
