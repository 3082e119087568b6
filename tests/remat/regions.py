"""Layers, checkpointed regions and fronts that the tests of frames share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from dfa_megatron import remat

HIDDEN, TOKENS = 8, 6


class Attention(torch.autograd.Function):
    """A stand-in that follows the protocol: ask for the frame, run and record, or take."""

    ran = 0

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        frame = remat.active_frame()
        if frame is None or frame.recording:
            Attention.ran += 1
            scores = q @ k.mT
            lse = scores.logsumexp(-1)
            out = (scores - lse[..., None]).exp() @ v
            if frame is not None:
                frame.record(out, lse)
        else:
            out, lse = frame.take()
            out = out.view_as(out)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        p = (q @ k.mT - lse[..., None]).exp()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ dout


class Layer(torch.nn.Module):
    """Norm, `attentions` attentions one after another, dropout and an MLP, with residuals."""

    def __init__(self, attentions: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, 3 * HIDDEN, dtype=torch.float64) for _ in range(attentions)
        )
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv in self.qkv:
            x = x + torch.dropout(Attention.apply(*qkv(self.norm(x)).chunk(3, -1)), self.dropout, self.training)
        return x + torch.dropout(self.mlp(x).tanh(), self.dropout, self.training)


class OwnReentrant(torch.autograd.Function):
    """A framework's checkpoint function, as DeepSpeed's and Megatron's are written."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.rng = run, torch.get_rng_state()
        ctx.devices = [x.device] if x.is_cuda else []
        ctx.device_rng = [torch.cuda.get_rng_state(device) for device in ctx.devices]
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=ctx.devices), torch.enable_grad():
            torch.set_rng_state(ctx.rng)
            for device, state in zip(ctx.devices, ctx.device_rng, strict=True):
                torch.cuda.set_rng_state(state, device)
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def full_early_stop_off(fn: Callable[..., Any], *args: Any) -> Any:
    """Non-reentrant frames with PyTorch's early stop of the recompute turned off."""
    with set_checkpoint_early_stop(False):
        return non_reentrant(fn, *args)


def non_reentrant(fn: Callable[..., Any], *args: Any) -> Any:
    """The `context_fn` front."""
    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=remat.context_fn)


def offloaded(fn: Callable[..., Any], *args: Any) -> Any:
    """The `context_fn` front whose results wait in host memory."""
    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=partial(remat.context_fn, offload=True))


FRONTS: dict[str, Callable[..., Any]] = {
    "context_fn": non_reentrant,
    "context_fn without early stop": full_early_stop_off,
    "remat_checkpoint": remat.remat_checkpoint,
    "remat_checkpoint around a framework's own": partial(remat.remat_checkpoint, checkpoint=OwnReentrant.apply),
    "context_fn, offloaded": offloaded,
    "remat_checkpoint, offloaded": partial(remat.remat_checkpoint, offload=True),
}
front = pytest.mark.parametrize("front", FRONTS.values(), ids=FRONTS.keys())
two_fronts = pytest.mark.parametrize(
    "front",
    [non_reentrant, remat.remat_checkpoint, offloaded, partial(remat.remat_checkpoint, offload=True)],
    ids=["context_fn", "reentrant", "context_fn, offloaded", "reentrant, offloaded"],
)


def direct(fn: Callable[..., Any], *args: Any) -> Any:
    """No checkpointing."""
    return fn(*args)


def step(layers: list[Layer], how: Callable[..., Any], seed: int) -> list[torch.Tensor]:
    """The output and all gradients of one forward and backward, each layer a region of its own."""
    torch.manual_seed(seed)
    leaf = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    x = leaf
    for layer in layers:
        layer.zero_grad()
        x = how(layer, x)
    (x * torch.randn_like(x)).sum().backward()
    return [x.detach(), leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())]


def make(layers: int, seed: int, **options: Any) -> list[Layer]:
    """Layers with seeded weights."""
    torch.manual_seed(1000 + seed)
    return [Layer(**options) for _ in range(layers)]
