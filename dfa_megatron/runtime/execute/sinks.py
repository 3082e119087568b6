"""Attention sinks: a logit per query head that takes part in the softmax and has no value.

A sink is one more partial with out 0 and lse = sink, merged once by the owner of complete rows. Kernels and messages
are not concerned. The backward runs with the merged lse and out, and is thereby exact for dq, dk and dv.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.merge import minus_delta, weights_of
from dfa_megatron.runtime.comm.channel import Channel


def form_of(sinks: torch.Tensor) -> object:
    """Return all of sinks that `refuse_sinks` looks at."""
    return (sinks.shape, sinks.dtype, sinks.device) if isinstance(sinks, torch.Tensor) else type(sinks)


def refuse_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse sinks that do not fit queries (batch, local_seq, heads, head_dim), and say what would."""
    if not isinstance(sinks, torch.Tensor):
        raise UnsupportedError(f"sinks of type {type(sinks).__name__}", "it is no tensor", "torch.tensor(sinks)")
    if sinks.shape != q.shape[2:3] or sinks.device != q.device or not sinks.dtype.is_floating_point:
        what = f"sinks {tuple(sinks.shape)}, {sinks.dtype}, on {sinks.device}"
        why = f"a sink is one number for each of {q.shape[2]} query heads"
        raise UnsupportedError(what, why, f"a floating tensor (heads,) on {q.device}")


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the sinks (heads,) into (out, lse) of complete rows; writes into out.

    A row that sees nothing keeps out 0, and its lse is the sink, which takes all of its probability.
    """
    sink = sinks.to(lse.dtype)[:, None]
    # Of PyTorch's functions for it, sigmoid and logaddexp depend on the place of a number in memory, on a CPU.
    (seen, _), total = weights_of(torch.stack([lse, sink.expand_as(lse)]))
    return out.mul_(seen.transpose(1, 2).unsqueeze(-1)), total


def exact_sum(over: Channel | None, terms: torch.Tensor) -> torch.Tensor:
    """Return the sum over sequences and rows of (batch, heads, rows) on the first rank, and 0 on the others.

    It is exact, so that its bits depend on neither ranks nor order: every number is cut into two integers, in units of
    the largest on any rank; sums of these are exact. Collective. over: the channel of the ranks; None for one.
    """
    terms = terms.double().transpose(0, 1).flatten(1)
    peak = torch.cat([terms.abs(), terms.new_zeros(len(terms), 1)], 1).amax(1)
    if over is not None:
        peak = torch.stack(over.gather(peak)).amax(0)
    _, exponent = torch.frexp(peak.nan_to_num(0.0, 0.0))
    high = (scaled := torch.ldexp(terms, _BITS - exponent[:, None])).round()
    low = ((scaled - high) * 2.0**_BITS).round()
    sums = torch.stack([high, low]).nan_to_num(0.0, 0.0, 0.0).long().sum(-1)
    if over is not None:
        sums = torch.stack(over.gather(sums)).sum(0)
    total = torch.ldexp(sums[0].double(), exponent - _BITS) + torch.ldexp(sums[1].double(), exponent - 2 * _BITS)
    total = total.where(peak.isfinite(), math.nan)
    return total if over is None or over.rank == 0 else torch.zeros_like(total)


_BITS = 38
"""Of each integer: 2 ** 24 rows of them fit in 64 bits."""


def sinks_gradient(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    summed: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the gradient of the sinks from this rank's rows: sum of p * -delta, p the probability of the sink.

    out and lse come from `merge_sinks`; delta = rowsum(dout * out). A sink of -inf is none, and its gradient is 0.
    summed: sums over sequences and rows, as `exact_sum` does.
    """
    sink = sinks.to(lse.dtype)[:, None]
    p = torch.exp(sink - lse).masked_fill_(sink == -math.inf, 0.0)  # as above
    terms = p * minus_delta(dout, out)
    return (terms.sum((0, 2)) if summed is None else summed(terms)).to(sinks.dtype)
