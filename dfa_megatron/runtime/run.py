"""Run a prepared attention on this rank: tensors in, tensors out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dfa_megatron.kernels.merge import row_dot
from dfa_megatron.plan.interpret import Algebra
from dfa_megatron.runtime.comm.arena import Arena
from dfa_megatron.runtime.comm.transport import Recv, Send, StepTransport, Transport
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.accumulators import Fields
from dfa_megatron.runtime.execute.alibi_positions import GlobalBias
from dfa_megatron.runtime.execute.cuda_graph import Captured
from dfa_megatron.runtime.execute.memory_plan import MemoryPlan
from dfa_megatron.runtime.execute.run_program import execute
from dfa_megatron.runtime.execute.tensors import Tensors
from dfa_megatron.runtime.hooks import Run, active_hooks
from dfa_megatron.runtime.prepare import Prepared


def forward_algebra(prepared: Prepared, inputs: Fields, arena: Arena) -> Tensors:
    """Return the memory of one rank's forward. inputs: see `run_forward`."""
    q, k, v, *slopes = inputs
    return _algebra(prepared, prepared.forward, {"q": (q,), "kv": (k, v)}, slopes, arena)


def backward_algebra(prepared: Prepared, inputs: Fields, arena: Arena) -> Tensors:
    """Return the memory of one rank's backward. inputs: see `run_backward`."""
    dout, q, k, v, needed, lse, *slopes = inputs
    return _algebra(prepared, prepared.backward, {"qdo": (q, dout, lse, needed), "kv": (k, v)}, slopes, arena)


def needed_by_backward(prepared: Prepared, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return out or delta (batch, heads, rows), whichever the kernel's backward reads beside lse."""
    return row_dot(dout, out) if prepared.format.backward_needs == "delta" else out


def run_forward(prepared: Prepared, inputs: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of this rank's rows: out in q's dtype, lse in the accumulator's.

    Args:
        inputs: q, k, v, and with ALiBi the slopes of q's heads.
    """
    COUNTERS.attention_forwards += 1
    COUNTERS.kernel_forwards += prepared.forward.calls
    COUNTERS.forward_messages += prepared.forward.messages
    COUNTERS.forward_bytes += prepared.forward.message_bytes
    out, lse = _captured_or_not(prepared, prepared.forward, _forward, inputs)
    return out, lse


def run_backward(prepared: Prepared, inputs: Fields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of this rank's rows, in q's dtype.

    Args:
        inputs: dout, q, k, v, the result of `needed_by_backward`, lse, and with ALiBi the slopes of q's heads.
    """
    COUNTERS.attention_backwards += 1
    COUNTERS.kernel_backwards += prepared.backward.calls
    COUNTERS.backward_messages += prepared.backward.messages
    COUNTERS.backward_bytes += prepared.backward.message_bytes
    dq, dk, dv = _captured_or_not(prepared, prepared.backward, _backward, inputs)
    return dq, dk, dv


def _forward(prepared: Prepared, *inputs: torch.Tensor) -> Fields:
    transport, arena = _way(prepared, prepared.forward, inputs[0].device)
    tensors = forward_algebra(prepared, inputs, arena)
    _execute(prepared, tensors, transport)
    return tensors.result("out")


def _backward(prepared: Prepared, *inputs: torch.Tensor) -> Fields:
    transport, arena = _way(prepared, prepared.backward, inputs[0].device)
    tensors = backward_algebra(prepared, inputs, arena)
    _execute(prepared, tensors, transport)
    return *tensors.result("dq"), *tensors.result("dkv")


def _captured_or_not(prepared: Prepared, memory: MemoryPlan, run: Callable[..., Fields], inputs: Fields) -> Fields:
    """Run, or replay where graphs were asked for and the caller is not capturing one of its own."""
    if not prepared.request.config.cuda_graph or torch.cuda.is_current_stream_capturing():
        return run(prepared, *inputs)
    # An arena that has grown lies elsewhere.
    key: tuple[str | int, ...] = (
        memory.program.phase.name,
        _way(prepared, memory, inputs[0].device)[0].generation,
        *[hook.name for hook in active_hooks()],
    )
    if key not in prepared.graphs:
        for stale in [other for other in prepared.graphs if other[0] == key[0]]:
            del prepared.graphs[stale]
        prepared.graphs[key] = Captured(functools.partial(run, prepared), inputs, prepared.channel)
    return prepared.graphs[key](inputs)


def _algebra(
    prepared: Prepared, memory: MemoryPlan, home: dict[str, Fields], slopes: Sequence[torch.Tensor], arena: Arena
) -> Tensors:
    request = prepared.request
    options: dict[str, Any] = {
        "softmax_scale": request.softmax_scale,
        "softcap": request.softcap,
        "deterministic": request.config.deterministic,
    }
    if slopes:
        of_phase = prepared.rank_plan.tokens[0 if memory is prepared.forward else 1]
        options["bias"] = GlobalBias(slopes[0], memory, of_phase)
    return Tensors(memory, prepared.kernel, home, arena, **options)


def _way(prepared: Prepared, memory: MemoryPlan, device: torch.device) -> tuple[Transport, Arena]:
    """Return the transport, and the memory that receives messages."""
    channel = prepared.channel
    if channel is None:
        transport: Transport = _Nobody()
    else:
        transport = channel.transports.get(device, prepared.transport)
        channel.calls.where = transport.where
    return transport, transport.arena(memory.arena_bytes, device)


def _execute(prepared: Prepared, tensors: Tensors, transport: Transport) -> None:
    driven: tuple[Algebra, StepTransport] = (tensors, transport)
    for hook in active_hooks():
        phases = prepared.plan
        driven = hook.wrap(Run(phases.forward if tensors.forward else phases.backward, tensors, *driven))
    execute(tensors, *driven, lambda step: prepared.picture(tensors.program.phase.name, step))


class _Nobody:
    """The transport of a group of one rank: there is nothing to move."""

    generation = 0

    def reserve(self, nbytes: int) -> None:
        pass

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        return Arena.allocate(nbytes, device)

    def start(self) -> None:
        pass

    def where(self) -> tuple[int, tuple[int, ...]]:
        return -1, ()

    def post(self, after: int, sends: Callable[[], Sequence[Send]], receives: Sequence[Recv]) -> None:
        assert not receives

    def land(self) -> None:
        pass

    def computed(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass
