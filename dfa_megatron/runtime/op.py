"""The distributed attention as operators of torch.library, for compilers and checkpointing policies."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.prepare import prepare
from dfa_megatron.runtime.run import run_backward, run_forward


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    prepared = prepare(request, group, q, k, v)
    heads = prepared.exchange
    if heads is None:
        out, lse = run_forward(prepared, q, k, v)
    else:
        out, lse = heads.after_forward(*run_forward(prepared, *heads.before_forward(q, k, v)))
    return out.contiguous(), lse.contiguous()


def _gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    prepared = prepare(request, group, q, k, v)
    heads = prepared.exchange
    if heads is None:
        gradients = run_backward(prepared, dout, q, k, v, out, lse)
    else:
        whole = heads.before_backward(dout, q, k, v, out, lse)
        gradients = heads.after_backward(*run_backward(prepared, *whole))
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv


@torch.library.custom_op("dfa_megatron::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's rows of a sequence sharded over a named group.

    q (batch, local_seq, heads, head_dim); k, v with kv_heads; out like q with v's head_dim; lse (batch, heads,
    local_seq) in float32, float64 for float64. `request` is `Request.to_text()`. lse carries no gradient.
    """
    return _forward(q, k, v, request, group)


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str) -> tuple[torch.Tensor, torch.Tensor]:
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
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of this rank's rows, given out and lse of the forward."""
    return _gradients(dout, q, k, v, out, lse, request, group)


@attention_backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.request, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    return (*attention_backward(dout, q, k, v, out, lse, ctx.request, ctx.group), None, None)


attention.register_autograd(_backward, setup_context=_setup_context)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, or the same past PyTorch's dispatcher where nothing listens there: it costs half a millisecond."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or type(q) not in _PLAIN:
        out, lse = attention(q, k, v, request, group)
    else:
        out, lse = Direct.apply(q, k, v, request, group)  # type: ignore[no-untyped-call]
    return out, lse


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Direct(torch.autograd.Function):
    """The operator for plain tensors; it saves the same five, which torch.utils.checkpoint compares."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        out, lse = _forward(q, k, v, request, group)
        ctx.request, ctx.group = request, group
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor | None) -> tuple[Any, ...]:
        """The operator's backward."""
        q, k, v, out, lse = ctx.saved_tensors
        return (*_gradients(dout, q, k, v, out, lse, ctx.request, ctx.group), None, None)


class Replay(torch.autograd.Function):
    """The attention of a recompute whose (out, lse) are known: nothing is computed or sent, the backward is the same.

    It saves the same five tensors as the operator, which torch.utils.checkpoint compares.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        request: str,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) as they were."""
        COUNTERS.replays += 1
        out, lse = out.detach(), lse.detach()
        ctx.request, ctx.group = request, group
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor | None) -> tuple[Any, ...]:
        """The operator's backward."""
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _gradients(dout, q, k, v, out, lse, ctx.request, ctx.group)
        return (*gradients, None, None, None, None)
