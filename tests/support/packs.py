"""Packs of random documents with what dense float64 attention makes of each document alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import Need
from dfa_megatron.plan.schedules.load_balanced import layout_of
from dfa_megatron.runtime.cu_seqlens import balancing_mask
from tests.support.cases import Case


def random_offsets(tokens: int, draw: random.Random) -> tuple[int, ...]:
    """From one document to one token each; most often a few short ones and a long one."""
    kind = draw.choice(["one", "single tokens", "short", "mixed", "mixed", "mixed"])
    if kind == "one" or tokens == 1:
        return 0, tokens
    if kind == "single tokens":
        return tuple(range(tokens + 1))
    most = 3 if kind == "short" else tokens
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(draw.randint(1, min(most, left)))
    draw.shuffle(lengths)
    return tuple(accumulate(lengths, initial=0))


def pack(
    offsets: tuple[int, ...],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float64,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float = 0.3,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random inputs in `dtype` without a batch dimension; out (tokens, heads, head_dim_v), lse (heads, tokens)."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, wide = offsets[-1], head_dim if head_dim_v is None else head_dim_v

    def random_rows(count: int, width: int) -> torch.Tensor:
        shape = (tokens, count, width)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)

    q, k = random_rows(heads, head_dim), random_rows(kv_heads, head_dim)
    v, dout = random_rows(kv_heads, wide), random_rows(heads, wide)
    exact = tuple(x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    results = [
        dense_attention(*(x[None, lo:hi] for x in exact), band_of(causal, window_size), softmax_scale=softmax_scale)
        for lo, hi in pairwise(offsets)
    ]
    out, lse = torch.cat([o[0] for o, _ in results]), torch.cat([x[0] for _, x in results], 1)
    gradients = torch.autograd.grad(out, exact, dout.double())
    return Case((q, k, v), dout, out.detach(), lse.detach(), gradients)


def tokens_of(layout: str, offsets: tuple[int, ...], ranks: int) -> list[torch.Tensor]:
    """The global positions of each rank's tokens."""
    whole = layout_of(layout, balancing_mask(offsets, offsets[-1]), ranks)
    return [torch.tensor(whole.positions(rank)) for rank in range(ranks)]


def skip_unless_it_serves_this_gpu(kernel: str) -> None:
    """Skip the test if a kernel refuses bfloat16 with 8 heads of 128 on 2, in full and causal blocks."""
    capability = torch.cuda.get_device_capability()
    need = Need("cuda", torch.bfloat16, 8, 2, 128, 128, frozenset({"full", "causal"}), capability=capability)
    if why := kernels.get(kernel).refusal(need):
        pytest.skip(f"{kernel}: {why}")


def served(kernel: str, call: Callable[[], None]) -> bool:
    """Whether a call was served: cudnn refuses, by name, plans that cut blocks off the diagonal; no other may."""
    try:
        call()
    except UnsupportedError as error:
        if kernel != "cudnn" or "it has no sliding window" not in str(error):
            raise
        return False
    return True
