"""The distributed attention as an autograd function, and as operators of torch.library for compilers and policies."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once, without_functions
from dfa_megatron.plan.language.heads import stages_error, stages_of
from dfa_megatron.runtime.agreement.calls import AtLayer, current_layer
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.alibi_positions import slopes_error
from dfa_megatron.runtime.execute.sinks import merge_sinks, sinks_error, sinks_gradient
from dfa_megatron.runtime.prepare import Prepared, prepare, refuse
from dfa_megatron.runtime.problem import Inputs, refuse_strangers, transformed
from dfa_megatron.runtime.request import Request, from_text
from dfa_megatron.runtime.run import run_backward, run_forward

Pair = tuple[torch.Tensor, torch.Tensor]
"""out like q with v's head_dim, and lse (batch, heads, rows) in the accumulator's dtype."""

InputGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of q, k, v and sinks; the last is None without sinks."""

SavedTensors = tuple[torch.Tensor | None, ...]
"""What every way of running saves, in this order: q, k, v, out, lse, sinks, slopes."""


def needs_gradient(inputs: Inputs) -> bool:
    """Return whether a backward may follow. Ranks must be alike in it: each takes part in the others' gradients."""
    q, k, v, sinks, _ = inputs
    try:
        some = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    except AttributeError:  # no tensor, which is refused in words
        return False
    return some and torch.is_grad_enabled()


def _forward(
    inputs: Inputs, request: Request, group: str, trains: bool
) -> tuple[Pair, tuple[torch.Tensor, ...], Prepared | None]:
    """Return (out, lse), q, k and v as an exchange of heads made them, or nothing, and what was prepared.

    Where heads run in stages the last two are () and None.
    """
    q, k, v, sinks, slopes = inputs
    error = None if sinks is None else sinks_error(sinks, q)
    error = error or (None if slopes is None else slopes_error(slopes, q))
    number = request.config.head_stages
    error = error or (None if number == 1 or k.dim() != 4 else stages_error(number, k.shape[2]))
    if error is not None:
        refuse(error, group, verify=request.verify)
        raise error
    if number == 1:
        return _forward_at_once(inputs, request, group, trains)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator_dtype(q.dtype))
    for heads, kv_heads in stages_of(number, q.shape[2], k.shape[2]):
        some_q, some_k, some_v, _, _, *more = _of_stage((q, k, v, None, None, sinks, slopes), heads, kv_heads)
        some = Inputs(some_q, some_k, some_v, *more)
        (out[:, :, heads], lse[:, heads]), _, _ = _forward_at_once(some, request, group, trains)
    return (out, lse), (), None


def _forward_at_once(
    inputs: Inputs, request: Request, group: str, trains: bool
) -> tuple[Pair, tuple[torch.Tensor, ...], Prepared]:
    """Return the same of all heads at once."""
    q, k, v, sinks, slopes = inputs
    prepared = prepare(request, group, inputs, trains=trains)
    with prepared.running[0 if trains else 2]:
        out, lse, *exchanged = run_forward(prepared, (q, k, v) if slopes is None else (q, k, v, slopes))
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return (out.contiguous(), lse.contiguous()), tuple(exchanged), prepared


def _backward_of(dout: torch.Tensor, saved: SavedTensors, request: Request, group: str) -> InputGradients:
    """Return the gradients of q, k, v and sinks, in as many stages of heads as the forward had."""
    q, k, v, _, _, sinks, slopes = saved
    assert q is not None and k is not None and v is not None  # noqa: PT018
    number = request.config.head_stages
    if number == 1:
        return _gradients(dout, saved, prepare(request, group, Inputs(q, k, v, slopes=slopes)))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsinks = None if sinks is None else sinks.new_empty(sinks.shape)
    for heads, kv_heads in stages_of(number, q.shape[2], k.shape[2]):
        some = _of_stage(saved, heads, kv_heads)
        prepared = prepare(request, group, Inputs(some[0], some[1], some[2], slopes=some[6]))
        part = dout[:, :, heads].contiguous()
        # Unpacked at once: no gradient of a stage is held while the next one runs.
        dq[:, :, heads], dk[:, :, kv_heads], dv[:, :, kv_heads], of_sinks = _gradients(part, some, prepared)
        if dsinks is not None and of_sinks is not None:
            dsinks[heads] = of_sinks
    return dq, dk, dv, dsinks


_HEADS = (2, 2, 2, 2, 1, 0, 0)
"""The dimension of heads in each tensor of `SavedTensors`."""


def _of_stage(saved: SavedTensors, heads: slice, kv_heads: slice) -> tuple[Any, ...]:
    """Return a stage's heads of each tensor, copied to memory of their own; None of None."""
    whose = heads, kv_heads, kv_heads, heads, heads, heads, heads
    return tuple(
        None if x is None else x.narrow(dim, which.start, which.stop - which.start).contiguous()
        for x, which, dim in zip(saved, whose, _HEADS, strict=True)
    )


def _gradients(
    dout: torch.Tensor, saved: SavedTensors, prepared: Prepared, *, exchanged: bool = False
) -> InputGradients:
    """Return the gradients of q, k, v and sinks; exchanged: the saved q, k and v are results of the exchange."""
    q, k, v, out, lse, sinks, slopes = saved
    assert q is not None and k is not None and v is not None and out is not None and lse is not None  # noqa: PT018
    inputs = (dout, q, k, v, out, lse) if slopes is None else (dout, q, k, v, out, lse, slopes)
    with prepared.running[1]:
        dq, dk, dv = run_backward(prepared, inputs, exchanged=exchanged)
    if prepared.whole is not None:
        prepared.whole.end_of_backward()
    dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


def attend(inputs: Inputs, request: Request, group: str, *, known: Pair | None = None, may_keep: bool = False) -> Pair:
    """Return (out, lse), past PyTorch's dispatcher where nothing listens there: it costs half a millisecond.

    Args:
        inputs: the tensors of the call.
        request: what is asked of them.
        group: the name of the ranks' group.
        known: the results, in a recompute whose first pass saved them; then nothing is computed or sent.
        may_keep: the backward may save q, k and v as they are after an exchange of heads: one exchange less.

    Raises:
        UnsupportedError: see `prepare`, and `Request.to_text` under a dispatch mode.
    """
    plain = _get_current_dispatch_mode() is None and type(inputs.q) in _PLAIN
    if not plain:
        refuse_strangers(inputs.q, inputs.k, inputs.v)
    if peek_interpreter_stack() is not None:
        raise transformed()
    if known is None and not plain:
        out, lse = attention(*inputs, request.to_text(), group, needs_gradient(inputs))
    else:
        with without_functions():
            trains = needs_gradient(inputs)
            out, lse = _Direct.apply(*inputs, request, group, trains, known, may_keep)  # type: ignore[no-untyped-call]
    return out, lse


_PLAIN = (torch.Tensor, torch.nn.Parameter)

_once = differentiable_once("attention", *(Inputs._fields.index(name) for name in ("q", "k", "sinks")))
"""Of v the gradients are linear."""


class _Direct(torch.autograd.Function):
    """The attention without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Pair:
        """Return (out, lse) of the inputs, the request, the group, whether it trains, known results, may_keep."""
        *tensors, request, group, trains, known, may_keep = given
        q, k, v, sinks, slopes = inputs = Inputs(*tensors)
        ctx.request, ctx.group, ctx.prepared, ctx.exchanged, ctx.layer = request, group, None, False, current_layer()
        if known is None:
            (out, lse), exchanged, ctx.prepared = _forward(inputs, request, group, trains)
            if may_keep and exchanged:
                ctx.exchanged = True
                q, k, v = exchanged
        else:
            COUNTERS.replays += 1
            out, lse = (x.detach() for x in known)
        _save(ctx, q, k, v, out, lse, sinks, slopes)
        return out, lse

    @staticmethod
    @_once
    def backward(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[Any, ...]:
        """Return the gradients of the inputs, and None for the rest."""
        saved = ctx.saved_tensors
        dout = torch.zeros_like(saved[3]) if dout is None else dout
        if is_batchedtensor(dout) or is_legacy_batchedtensor(dout):
            raise transformed()
        with AtLayer(ctx.layer):
            if ctx.prepared is None:
                gradients = _backward_of(dout, saved, ctx.request, ctx.group)
            else:
                gradients = _gradients(dout, saved, ctx.prepared, exchanged=ctx.exchanged)
        return *gradients, *(None,) * 6


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
    slopes: torch.Tensor | None,
    request: str,
    group: str,
    trains: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of this rank's rows of a sequence sharded over a named group.

    Tensors are those of `Inputs`; `request` is `Request.to_text()`; trains: see `needs_gradient`.
    lse carries no gradient.
    """
    pair, _, _ = _forward(Inputs(q, k, v, sinks, slopes), from_text(request), group, trains)
    return pair


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    *constants: str | bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if slopes is not None and (error := slopes_error(slopes, q)) is not None:
        raise error  # here: a compiled region forgets that slopes require a gradient
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
    """Return (dq, dk, dv) of this rank's rows, and dsinks (heads,), which is (0,) without sinks."""
    dq, dk, dv, dsinks = _backward_of(dout, (q, k, v, out, lse, sinks, slopes), from_text(request), group)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


@attention_backward.register_fake
def _(dout: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, _, lse, sinks, *_ = others
    dsinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, sinks, slopes, ctx.request, ctx.group, _ = inputs
    _save(ctx, q, k, v, *output, sinks, slopes)


@_once
def _backward(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    *gradients, dsinks = attention_backward(dout, *saved, ctx.request, ctx.group)
    return *gradients, None if saved[5] is None else dsinks, None, None, None, None


attention.register_autograd(_backward, setup_context=_setup_context)
