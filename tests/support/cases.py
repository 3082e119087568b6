"""Inputs, shards and dense results that the runtime's tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.plan.language.layout import by_name

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A whole attention: inputs, the gradient of its output, and what dense float64 attention makes of them."""

    inputs: Tensors
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    gradients: Tensors


def case(
    length: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random inputs in `dtype`; the reference takes the rounded inputs and computes in float64, on the same device."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(count: int) -> torch.Tensor:
        shape = (batch, length, count, head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)

    q, k, v, dout = random(heads), random(kv_heads), random(kv_heads), random(heads)
    exact = tuple(x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(*exact, band_of(causal, window_size), softmax_scale=softmax_scale)
    gradients = torch.autograd.grad(out, exact, dout.double())
    return Case((q, k, v), dout, out.detach(), lse.detach(), gradients)


def positions(layout: str, length: int, ranks: int) -> list[torch.Tensor]:
    """The global positions of each rank's tokens."""
    chunks = by_name(layout, length, ranks)
    return [
        torch.cat([torch.arange(chunks.chunks[chunk].lo, chunks.chunks[chunk].hi) for chunk in chunks.of(rank)])
        for rank in range(ranks)
    ]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative norm of the error of a whole output or gradient that rounding explains."""
