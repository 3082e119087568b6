"""What changes scores beside the mask: attention sinks, and the slopes of ALiBi.

A sink is one more partial with out 0 and lse = sink, merged once by the owner of complete rows. Kernels and messages
are not concerned. The backward runs with the merged lse and out, and is thereby exact for dq, dk and dv.
Slopes bias scores by the distance of tokens, so a kernel call gets the token of each of its rows.
"""

from __future__ import annotations

import hashlib
import math
import weakref

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import Alibi
from dfa_megatron.kernels.current_stream import stream_of
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.kernels.tape import unrecorded
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.program import Call, Region
from dfa_megatron.runtime.rank_plan import MemoryPlan


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


def slopes_error(slopes: torch.Tensor, q: torch.Tensor) -> UnsupportedError | None:
    """Return the error in the slopes for queries (batch, local_seq, heads, head_dim), or None."""
    if not isinstance(slopes, torch.Tensor):
        found = f"alibi_slopes of type {type(slopes).__name__}"
        return UnsupportedError(found, "it is no tensor", "torch.tensor(alibi_slopes)")
    what = f"alibi_slopes {tuple(slopes.shape)}, {slopes.dtype}, on {slopes.device}"
    if slopes.requires_grad:
        return UnsupportedError(
            f"{what}, which require a gradient", "a slope is a constant: it has none here", "alibi_slopes.detach()"
        )
    if q.dim() == 4 and slopes.shape == q.shape[2:3] and slopes.device == q.device and slopes.dtype == torch.float32:
        return None
    heads = f"{q.shape[2]} query heads" if q.dim() == 4 else "every query head"
    return UnsupportedError(
        what, f"a slope is one number for each of {heads}", f"a float32 tensor (heads,) on {q.device}"
    )


def describe_slopes(slopes: torch.Tensor) -> str:
    """Return the slopes as ranks compare them; this waits for their device."""
    values = slopes.tolist()
    shown = ", ".join(f"{value:.6g}" for value in values[:4]) + (", ..." if len(values) > 4 else "")
    return f"{shown} (digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]})"


Positions = dict[tuple[int, str], torch.Tensor]
"""(buffer, name) -> int32 (rows,): the token of each row."""

_positions: weakref.WeakKeyDictionary[MemoryPlan, dict[tuple[torch.device, int], Positions]] = (
    weakref.WeakKeyDictionary()
)


class GlobalBias:
    """The bias of every call of one phase on this rank.

    Args:
        slopes: (heads,), float32: of the heads that the plan's ranks compute.
        memory: the program; positions are cached beside it, for each device and stream.
    """

    def __init__(self, slopes: torch.Tensor, memory: MemoryPlan) -> None:
        self.slopes = slopes.contiguous()
        by_device = _positions.setdefault(memory, {})
        key = slopes.device, stream_of(slopes.device)
        positions = by_device.get(key)
        if positions is None:
            with unrecorded():
                positions = {
                    where: torch.cat([_tokens(span, slopes.device) for span in spans or (Span(0, 0),)])
                    for where, spans in memory.tokens.items()
                }
            if not (slopes.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's memory is its own
                by_device[key] = positions
        self.positions = positions

    def of(self, call: Call) -> Alibi:
        """Return the bias of one call."""
        keys = [self._rows(region) for region in call.kv]
        return Alibi(self.slopes, self._rows(call.q), keys[0] if len(keys) == 1 else torch.cat(keys))

    def _rows(self, region: Region) -> torch.Tensor:
        return self.positions[region.buffer, region.name][region.lo : region.hi]


def _tokens(span: Span, device: torch.device) -> torch.Tensor:
    return torch.arange(span.lo, span.hi, dtype=torch.int32, device=device)
