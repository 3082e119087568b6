"""Ulysses as in its paper (2309.14509): an all-to-all turns a part of the sequence into a part of the heads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, local_attention
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError


def methods(job: Job) -> list[Method]:
    """Return one method per kernel of the job."""
    return [_with_kernel(kernel) for kernel in job.kernel]


def refuse_heads(problem: Problem, ranks: int, *, copies: bool = False) -> None:
    """Refuse heads that do not divide among the ranks.

    copies: the method gives one key/value head to several ranks where there are fewer.

    Raises:
        UnsupportedError: there are too few, or they do not divide.
    """
    heads, kv_heads = problem.heads, problem.kv_heads
    if heads % ranks or (kv_heads % ranks and not (copies and ranks % kv_heads == 0)):
        raise UnsupportedError(
            f"all-to-all over {ranks} ranks of {heads} heads and {kv_heads} kv_heads",
            "it divides both among the ranks",
            "multiples of the number of ranks",
        )


def _with_kernel(kernel: str) -> Method:
    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        refuse_heads(problem, world.size, copies=True)
        local = local_attention(kernel, problem, world.device, share=world.size)
        copies = max(1, world.size // problem.kv_heads)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if copies > 1:  # every rank needs a key/value head
                k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
            return to_sequence(local(*(to_heads(x) for x in (q, k, v))))

        return attend

    return Method(f"ulysses {kernel}", "baseline", start, note="reference over torch.distributed.all_to_all_single")


class _Exchange(torch.autograd.Function):
    """Send the r-th of (ranks, ...) to rank r. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


def _exchange(parts: torch.Tensor) -> torch.Tensor:
    received: torch.Tensor = _Exchange.apply(parts.contiguous())  # type: ignore[no-untyped-call]
    return received


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """Exchange (batch, local_seq, heads, dim) for (batch, seq, heads of this rank, dim)."""
    batch, rows, heads, dim = x.shape
    ranks = dist.get_world_size()
    parts = _exchange(x.view(batch, rows, ranks, heads // ranks, dim).permute(2, 0, 1, 3, 4))
    return parts.transpose(0, 1).reshape(batch, ranks * rows, heads // ranks, dim)


def to_sequence(x: torch.Tensor) -> torch.Tensor:
    """Exchange (batch, seq, heads of this rank, dim) for (batch, local_seq, heads, dim)."""
    batch, rows, heads, dim = x.shape
    ranks = dist.get_world_size()
    parts = _exchange(x.view(batch, ranks, rows // ranks, heads, dim).transpose(0, 1))
    return parts.permute(1, 2, 0, 3, 4).reshape(batch, rows // ranks, ranks * heads, dim)


def whole_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int] = ()) -> torch.Tensor:
    """Attend causally to a whole sequence (batch, seq, heads, dim), or within each of a pack's documents.

    By flash-attn-4, or PyTorch's attention on a CPU.
    """
    if q.device.type == "cpu":
        parts = zip(*(x.transpose(1, 2).split([*lengths] or x.shape[1], dim=2) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(outs, dim=2).transpose(1, 2)
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    q, k, v = (x.contiguous() for x in (q, k, v))
    if not lengths:
        out: torch.Tensor = flash_attn_func(q, k, v, causal=True)[0]
        return out
    starts = _starts(tuple(lengths), q.device)
    longest = max(512, *lengths)  # a pack of shorter ones would compile other kernels
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return flash_attn_varlen_func(q[0], k[0], v[0], **given, causal=True)[0][None]


@functools.lru_cache(maxsize=1)
def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
