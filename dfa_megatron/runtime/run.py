"""Run a prepared attention on this rank: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute import execute
from dfa_megatron.runtime.memory import MemoryPlan
from dfa_megatron.runtime.prepare import Prepared
from dfa_megatron.runtime.tensors import Fields, Tensors
from dfa_megatron.runtime.transport import Parcel, Transport


def forward_algebra(prepared: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """The memory of one rank's forward."""
    return _algebra(prepared, prepared.forward, {"q": (q,), "kv": (k, v)})


def backward_algebra(
    prepared: Prepared,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Tensors:
    """The memory of one rank's backward; delta = rowsum(dout * out) is computed once, in the accumulator's dtype."""
    memory = out
    if prepared.format.reads == "delta":
        high = accumulator_dtype(q.dtype)
        memory = (dout.to(high) * out.to(high)).sum(-1).transpose(1, 2)
    return _algebra(prepared, prepared.backward, {"qdo": (q, dout, lse, memory), "kv": (k, v)})


def run_forward(
    prepared: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's rows: out in q's dtype, lse in the accumulator's."""
    COUNTERS.attention_forwards += 1
    algebra = forward_algebra(prepared, q, k, v)
    _execute(prepared, algebra)
    out, lse = algebra.result("out")
    return out.to(q.dtype), lse


def run_backward(
    prepared: Prepared,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of this rank's rows, in q's dtype."""
    COUNTERS.attention_backwards += 1
    algebra = backward_algebra(prepared, dout, q, k, v, out, lse)
    _execute(prepared, algebra)
    (dq,), (dk, dv) = algebra.result("dq"), algebra.result("dkv")
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _algebra(prepared: Prepared, memory: MemoryPlan, home: dict[str, Fields]) -> Tensors:
    request = prepared.request
    return Tensors(
        memory,
        prepared.kernel,
        home,
        softmax_scale=request.softmax_scale,
        deterministic=request.deterministic,
    )


def _execute(prepared: Prepared, algebra: Tensors) -> None:
    transport: Transport = prepared.channel.transport(algebra.device) if prepared.channel else _Nobody()
    execute(algebra, transport, lambda step: prepared.picture(algebra.program.phase.name, step))


class _Nobody:
    """The transport of a group of one rank: there is nothing to move."""

    def start(self) -> None:
        pass

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        assert not receives

    def land(self) -> None:
        pass

    def computed(self, step: int) -> None:
        pass
