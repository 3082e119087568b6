"""Attention sinks: a logit per query head that takes part in the softmax and has no value.

A sink is one more partial with out 0 and lse = sink, merged once by the owner of complete rows. Kernels and messages
are not concerned. The backward runs with the merged lse and out, and is thereby exact for dq, dk and dv.
"""

from __future__ import annotations

import math

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.merge import minus_delta


def sinks_error(sinks: torch.Tensor, q: torch.Tensor) -> UnsupportedError | None:
    """Return the error in the sinks for queries (batch, local_seq, heads, head_dim), or None."""
    if not isinstance(sinks, torch.Tensor):
        return UnsupportedError(f"sinks of type {type(sinks).__name__}", "it is no tensor", "torch.tensor(sinks)")
    if q.dim() == 4 and sinks.shape == q.shape[2:3] and sinks.device == q.device and sinks.dtype.is_floating_point:
        return None
    what = f"sinks {tuple(sinks.shape)}, {sinks.dtype}, on {sinks.device}"
    heads = f"{q.shape[2]} query heads" if q.dim() == 4 else "every query head"
    return UnsupportedError(
        what, f"a sink is one number for each of {heads}", f"a floating tensor (heads,) on {q.device}"
    )


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the sinks (heads,) into (out, lse) of complete rows; writes into out.

    A row that sees nothing keeps out 0, and its lse is the sink, which takes all of its probability.
    """
    sink = sinks.to(lse.dtype)[:, None]
    seen = torch.sigmoid(lse - sink).masked_fill_(lse == -math.inf, 0.0)  # -inf - -inf would be NaN
    return out.mul_(seen.transpose(1, 2).unsqueeze(-1)), torch.logaddexp(lse, sink)


def sinks_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks from this rank's rows: sum of p * -delta, p the probability of the sink.

    out and lse come from `merge_sinks`; delta = rowsum(dout * out). A sink of -inf is none, and its gradient is 0.
    """
    sink = sinks.to(lse.dtype)[:, None]
    p = torch.exp(sink - lse).masked_fill_(sink == -math.inf, 0.0)  # as above
    return (p * minus_delta(dout, out)).sum((0, 2)).to(sinks.dtype)
