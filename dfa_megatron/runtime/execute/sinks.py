"""Attention sinks: a learned logit per head that takes part in the softmax and has no value, merged in once at home.

A sink is one more partial, with out 0 and lse = sink, of rows that are complete. So no kernel and no message knows of
it: the backward runs with the merged lse and out, which is all that makes it exact for dq, dk and dv.
"""

from __future__ import annotations

import math

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.merge import row_dot


def sinks_error(sinks: torch.Tensor, q: torch.Tensor) -> UnsupportedError | None:
    """What is wrong with the sinks of a call with these queries (batch, local_seq, heads, head_dim), or None."""
    if q.dim() == 4 and sinks.shape == q.shape[2:3] and sinks.device == q.device and sinks.dtype.is_floating_point:
        return None
    what = f"sinks {tuple(sinks.shape)}, {sinks.dtype}, on {sinks.device}"
    heads = f"{q.shape[2]} query heads" if q.dim() == 4 else "every query head"
    return UnsupportedError(
        what, f"a sink is one number for each of {heads}", f"a floating tensor (heads,) on {q.device}"
    )


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of complete rows with the sinks (heads,) among what they see; writes into out.

    A row that sees nothing keeps out 0, and its lse is the sink: all of its probability has gone there.
    """
    sink = sinks.to(lse.dtype)[:, None]
    seen = torch.sigmoid(lse - sink).masked_fill_(lse == -math.inf, 0.0)  # -inf - -inf would be NaN
    return out.mul_(seen.transpose(1, 2).unsqueeze(-1)), torch.logaddexp(lse, sink)


def sinks_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks from this rank's rows: -sum of p * delta, p the probability that goes to the sink.

    out and lse are those that `merge_sinks` made; delta = rowsum(dout * out). A sink of -inf is none, its gradient 0.
    """
    sink = sinks.to(lse.dtype)[:, None]
    p = torch.exp(sink - lse).masked_fill_(sink == -math.inf, 0.0)  # as above
    return -(p * row_dot(dout, out)).sum((0, 2)).to(sinks.dtype)
