"""The distributed attention as operators of torch.library, for compilers and checkpointing policies."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.runtime.agreement.calls import at_layer, current_layer
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.alibi_positions import slopes_error
from dfa_megatron.runtime.execute.sinks import merge_sinks, sinks_error, sinks_gradient
from dfa_megatron.runtime.execute.ulysses import HeadExchange
from dfa_megatron.runtime.prepare import prepare, refuse
from dfa_megatron.runtime.request import from_text
from dfa_megatron.runtime.run import read_backward, run_backward, run_forward

Kept = tuple[HeadExchange, torch.Tensor, torch.Tensor, torch.Tensor]
"""An exchange of heads, and the q, k and v that it made of the caller's."""


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
    """(out, lse), and what a backward may keep in place of q, k and v, so that it need not exchange them again."""
    error = None if sinks is None else sinks_error(sinks, q)
    error = error or (None if slopes is None else slopes_error(slopes, q))
    if error is not None:
        refuse(error, group, from_text(request).guard)
        raise error
    prepared = prepare(request, group, q, k, v, slopes)
    heads, kept = prepared.exchange, None
    with prepared.running(0, q.device):
        if heads is None:
            out, lse = run_forward(prepared, q, k, v, slopes)
        else:
            own = None if slopes is None else heads.own_heads(slopes)
            whole = heads.before_forward(q, k, v)
            out, lse = heads.after_forward(*run_forward(prepared, *whole, own))
            kept = (heads, *whole) if heads.keeps else None
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return out.contiguous(), lse.contiguous(), kept


def _gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
    exchanged: HeadExchange | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and sinks; exchanged: q, k and v are what this made of the caller's."""
    given = (q, k, v) if exchanged is None else (exchanged.given(q), exchanged.given(k), exchanged.given(v))
    prepared = prepare(request, group, *given, slopes)
    heads, read = prepared.exchange, read_backward(prepared, dout, out)
    with prepared.running(1, dout.device):
        if heads is None:
            gradients = run_backward(prepared, dout, q, k, v, read, lse, slopes)
        else:
            own = None if slopes is None else heads.own_heads(slopes)
            whole = heads.before_backward(dout, q, k, v, read, lse, saved=exchanged is not None)
            gradients = heads.after_backward(*run_backward(prepared, *whole, own))
    if prepared.whole is not None:
        prepared.whole.end_of_backward()
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv, lse.new_empty(0) if sinks is None else sinks_gradient(dout, out, lse, sinks)


@torch.library.custom_op("dfa_megatron::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's rows of a sequence sharded over a named group.

    q (batch, local_seq, heads, head_dim); k, v with kv_heads; out like q with v's head_dim; lse (batch, heads,
    local_seq) in float32, float64 for float64; sinks, slopes (heads,). `request` is `Request.to_text()`. lse carries no
    gradient.
    """
    out, lse, _ = _forward(q, k, v, sinks, slopes, request, group)
    return out, lse


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if slopes is not None and (error := slopes_error(slopes, q)) is not None:
        raise error  # here, for what is compiled keeps no trace of slopes that require a gradient
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
    slopes: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of this rank's rows, given out and lse of the forward; dsinks (heads,), or (0,) without sinks."""
    return _gradients(dout, q, k, v, out, lse, sinks, slopes, request, group)


@attention_backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dsinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, slopes, ctx.request, ctx.group = inputs
    _save(ctx, q, k, v, *output, sinks, slopes)


def _save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """What every way of running keeps, for torch.utils.checkpoint compares: q, k, v, out, lse, sinks, slopes.

    In their place, where nobody compares, `Direct` keeps what heads were exchanged to.
    """
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(tensors[4])


def _backward(ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, slopes = ctx.saved_tensors
    dq, dk, dv, dsinks = attention_backward(dout, q, k, v, out, lse, sinks, slopes, ctx.request, ctx.group)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None


attention.register_autograd(_backward, setup_context=_setup_context)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
    *,
    replayed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, or the same past PyTorch's dispatcher where nothing listens there: it costs half a millisecond.

    replayed: the results are recorded, and the backward will be that of a `Replay`.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or type(q) not in _PLAIN:
        out, lse = attention(q, k, v, sinks, slopes, request, group)
    else:
        out, lse = Direct.apply(q, k, v, sinks, slopes, request, group, not replayed)  # type: ignore[no-untyped-call]
    return out, lse


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Direct(torch.autograd.Function):
    """The operator for plain tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        request: str,
        group: str,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse). keeps: q, k and v may be kept as heads were exchanged to, in as much memory."""
        out, lse, kept = _forward(q, k, v, sinks, slopes, request, group)
        ctx.request, ctx.group, ctx.exchanged, ctx.layer = request, group, None, current_layer()
        if keeps and kept is not None:
            ctx.exchanged, q, k, v = kept
        _save(ctx, q, k, v, out, lse, sinks, slopes)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor | None) -> tuple[Any, ...]:
        """The operator's backward."""
        return *_direct_backward(ctx, dout), None


class Replay(torch.autograd.Function):
    """The attention of a recompute whose (out, lse) are known: nothing is computed or sent; the same backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        request: str,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) as they were."""
        COUNTERS.replays += 1
        out, lse = out.detach(), lse.detach()
        ctx.request, ctx.group, ctx.exchanged, ctx.layer = request, group, None, current_layer()
        _save(ctx, q, k, v, out, lse, sinks, slopes)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor | None) -> tuple[Any, ...]:
        """The operator's backward."""
        dq, dk, dv, dsinks, slopes, request, group = _direct_backward(ctx, dout)
        return dq, dk, dv, dsinks, slopes, None, None, request, group


def _direct_backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of (q, k, v, sinks, slopes, request, group), past the dispatcher."""
    q, k, v, out, lse, sinks, slopes = ctx.saved_tensors
    with at_layer(ctx.layer):
        dq, dk, dv, dsinks = _gradients(dout, q, k, v, out, lse, sinks, slopes, ctx.request, ctx.group, ctx.exchanged)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None
