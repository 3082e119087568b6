"""One rank's attention without the other ranks: its messages go nowhere, so only its times mean something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.bench import Call
from dfa_megatron import DistAttentionConfig
from dfa_megatron.runtime.prepare import Prepared, build
from dfa_megatron.runtime.request import Inputs, Request
from dfa_megatron.runtime.run import run_backward, run_forward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(tokens: int, heads: int, kv_heads: int, head_dim: int, seed: int | None = None, **where: Any) -> Tensors:
    """Return q, k, v and dout (1, tokens, heads, head_dim), with the `dtype` and `device` that are given.

    seed: gives the same numbers on every rank of one kind of device.
    """
    if seed is not None:
        where["generator"] = torch.Generator(where["device"]).manual_seed(seed)
    q, k, v, dout = (torch.randn(1, tokens, n, head_dim, **where) for n in (heads, kv_heads, kv_heads, heads))
    return q, k, v, dout


def passes(attend: Callable[..., Any], leaves: Sequence[torch.Tensor], dout: torch.Tensor) -> tuple[Call, Call]:
    """Return the forward, and the forward and backward, of a function of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    return torch.no_grad()(lambda: attend(*leaves)), lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def prepare(given: Tensors, ranks: int, rank: int, kernel: str, **more: Any) -> Prepared:
    """Return one rank's causal attention; `more` goes to its request."""
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=1)
    request = Request(softmax_scale=given[0].shape[-1] ** -0.5, causal=True, config=config, **more)
    return build(request, ranks, rank, Inputs(*given[:3]))


def both_phases(prepared: Prepared, given: Tensors, *, backward: bool = True) -> Call:
    """Return a forward, and its backward, of a prepared attention."""
    q, k, v, dout = given

    @torch.no_grad()
    def call() -> object:
        out, lse = run_forward(prepared, Inputs(q, k, v))
        return run_backward(prepared, dout, (q, k, v, out, lse, None)) if backward else out

    return call
