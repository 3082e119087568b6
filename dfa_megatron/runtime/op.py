"""The distributed attention as an autograd function, and as operators of torch.library for compilers and policies."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.runtime import run
from dfa_megatron.runtime.agreement.calls import AtLayer, current_layer
from dfa_megatron.runtime.comm.channel import refuse
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.prepare import Prepared, prepare
from dfa_megatron.runtime.request import Inputs, from_text, transformed

Pair = tuple[torch.Tensor, torch.Tensor]
"""out like q with v's head_dim, and lse (batch, heads, rows) in the accumulator's dtype."""


class ActiveFrame(Protocol):
    """One pass through a checkpointed region: see `dfa_megatron.remat`, which other calls need not load."""

    @property
    def recording(self) -> bool:
        """Whether the attention must run and call `record`; otherwise it calls `take` and must not run."""

    def record(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Save the result of an attention that just ran."""

    def take(self) -> Pair:
        """Return the result of the first pass."""


class _Active(threading.local):
    frame: ActiveFrame | None = None


ACTIVE = _Active()
"""The frame of each thread."""


def active_frame() -> ActiveFrame | None:
    """Return this thread's current frame; None outside of regions and under torch.compile."""
    return None if torch.compiler.is_compiling() else ACTIVE.frame


def needs_gradient(inputs: Inputs) -> bool:
    """Return whether a backward may follow. Ranks must be alike in it: each takes part in the others' gradients."""
    q, k, v, sinks = inputs
    try:
        some = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    except AttributeError:  # no tensor, which is refused in words
        return False
    return some and torch.is_grad_enabled()


_once = differentiable_once("attention", *(Inputs._fields.index(name) for name in ("q", "k", "sinks")))
"""Of v the gradients are linear."""


class DirectAttention(torch.autograd.Function):
    """The attention past PyTorch's dispatcher, which costs half a millisecond."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Pair:
        """Return (out, lse).

        given: the inputs, the request, the channel, whether it trains, the results if a recompute's first pass saved
        them, and whether the backward may save q, k and v as they are after an exchange of heads.
        """
        *tensors, request, over, trains, known, may_keep = given
        q, k, v, sinks = inputs = Inputs(*tensors)
        ctx.request, ctx.over, ctx.prepared, ctx.layer = request, over, None, current_layer()
        if known is not None:
            COUNTERS.reused += 1
            out, lse = (x.detach() for x in known)
        else:
            ctx.prepared = prepare(request, over, inputs, trains=trains)
            ctx.prepared.say_how(q.device, saves=not may_keep)
            out, lse, *exchanged = run.run_forward(ctx.prepared, inputs, trains=trains)
            if may_keep and exchanged:
                q, k, v = exchanged
        _save(ctx, q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    @_once
    def backward(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[Any, ...]:
        """Return the gradients of the inputs, and None for the rest."""
        since = 0 if ctx.over is None else ctx.over.calls.last.number
        try:
            saved = ctx.saved_tensors
            dout = torch.zeros_like(saved[3]) if dout is None else dout
            if is_batchedtensor(dout) or is_legacy_batchedtensor(dout):
                raise transformed()
            with AtLayer(ctx.layer):
                prepared = ctx.prepared or prepare(ctx.request, ctx.over, Inputs(*saved[:3]))
                gradients = run.run_backward(prepared, dout, saved)
        except Exception as error:
            refuse(error, ctx.over, since)
            raise
        return *gradients, *(None,) * 5


def _save(ctx: Any, *saved: torch.Tensor | None) -> None:
    """Save the same for every way of running, because torch.utils.checkpoint compares: see `SavedTensors`.

    A backward gets None for the gradient of lse, not zeros. It may get None for that of out, and runs all the same:
    other ranks wait for this one.
    """
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(saved[4])
    ctx.set_materialize_grads(False)


@torch.library.custom_op("dfa_megatron::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    request: str,
    group: str,
    trains: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of this rank's rows of a sequence sharded over a named group.

    Tensors are those of `Inputs`; `request` is `Request.to_text()`; trains: see `needs_gradient`.
    lse carries no gradient.
    """
    inputs = Inputs(q, k, v, sinks)
    prepared = _prepared(request, group, inputs, trains=trains)
    prepared.say_how(q.device, saves=False)
    out, lse, *_ = run.run_forward(prepared, inputs, trains=trains)
    return out, lse


def _prepared(request: str, group: str, inputs: Inputs, *, trains: bool = True) -> Prepared:
    try:
        asked = from_text(request)
    except UnsupportedError as error:  # which no rank has checked under a compiler
        refuse(error, channel_of(group))
        raise
    return prepare(asked, channel_of(group, verify=asked.verify), inputs, trains=trains)


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *constants: str | bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, rows, heads, v.shape[3])), lse


@torch.library.custom_op("dfa_megatron::attention_backward", mutates_args=())
def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of this rank's rows, and dsinks (heads,), which is (0,) without sinks."""
    prepared = _prepared(request, group, Inputs(q, k, v))
    dq, dk, dv, dsinks = run.run_backward(prepared, dout, (q, k, v, out, lse, sinks))
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


@attention_backward.register_fake
def _(dout: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, _, lse, sinks, *_ = others
    dsinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, sinks, ctx.request, ctx.group, _ = inputs
    _save(ctx, q, k, v, *output, sinks)


@_once
def _backward(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    *gradients, dsinks = attention_backward(dout, *saved, ctx.request, ctx.group)
    return *gradients, None if saved[5] is None else dsinks, None, None, None


attention.register_autograd(_backward, setup_context=_setup_context)
