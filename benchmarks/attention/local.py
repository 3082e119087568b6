"""A block kernel as an attention of one process: the roof of every method, and what the all-to-all methods call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention.job import Problem
from dfa_megatron import kernels
from dfa_megatron.kernels.api import BlockCall, BlockKernel, Need, Saved
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band

Local = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def local_attention(kernel: str, problem: Problem, device: torch.device, share: int = 1) -> Local:
    """Return the differentiable attention of a whole sequence in one process, by one kernel and nothing else.

    Args:
        kernel: a name, or "auto".
        share: ranks that the heads are divided among.

    Raises:
        UnsupportedError: the kernel does not serve the problem.
    """
    need = Need(
        device=device.type,
        dtype=getattr(torch, problem.dtype),
        heads=problem.heads // share,
        kv_heads=max(1, problem.kv_heads // share),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim,
        forms=frozenset({"causal" if problem.causal else "full"}),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
    )
    chosen = kernels.select(kernel, need)
    band = CAUSAL if problem.causal else FULL
    scale = float(problem.head_dim**-0.5)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = KernelAttention.apply(q, k, v, chosen, band, scale)  # type: ignore[no-untyped-call]
        return out

    return attend


class KernelAttention(torch.autograd.Function):
    """A block kernel with its own backward, as an operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: BlockKernel, band: Band, scale: float
    ) -> torch.Tensor:
        """Return the block's out."""
        out, lse = kernel.forward(BlockCall.of(q, k, v, band, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.band, ctx.scale = kernel, band, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        """Return (dq, dk, dv), and None for the rest."""
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.kernel.backward_needs == "out" or ctx.kernel.takes_out:
            saved = Saved(lse, out=out)
        else:
            saved = Saved(lse, minus_delta=minus_delta(dout, out))
        gradients = ctx.kernel.backward(BlockCall.of(q, k, v, ctx.band, ctx.scale), dout, saved)
        return (*(gradient.to(q.dtype) for gradient in gradients), None, None, None)
