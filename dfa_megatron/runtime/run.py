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
from dfa_megatron.runtime.execute.steps import execute
from dfa_megatron.runtime.execute.tensors import Tensors
from dfa_megatron.runtime.hooks import Run, active_hooks
from dfa_megatron.runtime.prepare import Prepared


def forward_algebra(
    prepared: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, arena: Arena
) -> Tensors:
    """The memory of one rank's forward."""
    return _algebra(prepared, prepared.forward, {"q": (q,), "kv": (k, v)}, slopes, arena)


def backward_algebra(
    prepared: Prepared,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    lse: torch.Tensor,
    slopes: torch.Tensor | None,
    arena: Arena,
) -> Tensors:
    """The memory of one rank's backward; read: see `read_backward`."""
    return _algebra(prepared, prepared.backward, {"qdo": (q, dout, lse, read), "kv": (k, v)}, slopes, arena)


def read_backward(prepared: Prepared, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What the kernel's backward reads of rows beside their lse: out, or delta (batch, heads, rows), computed once."""
    return row_dot(dout, out) if prepared.format.backward_needs == "delta" else out


def run_forward(
    prepared: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's rows: out in q's dtype, lse in the accumulator's. slopes: of ALiBi, for q's heads."""
    COUNTERS.attention_forwards += 1
    COUNTERS.kernel_forwards += prepared.forward.calls
    COUNTERS.forward_messages += prepared.forward.messages
    COUNTERS.forward_bytes += prepared.forward.message_bytes
    out, lse = _captured_or_not(prepared, prepared.forward, _forward, (q, k, v, *_given(slopes)))
    return out, lse


def run_backward(
    prepared: Prepared,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    lse: torch.Tensor,
    slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of this rank's rows, in q's dtype; read: see `read_backward`."""
    COUNTERS.attention_backwards += 1
    COUNTERS.kernel_backwards += prepared.backward.calls
    COUNTERS.backward_messages += prepared.backward.messages
    COUNTERS.backward_bytes += prepared.backward.message_bytes
    inputs = (dout, q, k, v, read, lse, *_given(slopes))
    dq, dk, dv = _captured_or_not(prepared, prepared.backward, _backward, inputs)
    return dq, dk, dv


def _given(slopes: torch.Tensor | None) -> Fields:
    """An input like any other where there are some: a captured graph must see those of each call."""
    return () if slopes is None else (slopes,)


def _forward(
    prepared: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None = None
) -> Fields:
    transport, arena = _way(prepared, prepared.forward, q.device)
    algebra = forward_algebra(prepared, q, k, v, slopes, arena)
    _execute(prepared, algebra, transport)
    return algebra.result("out")


def _backward(
    prepared: Prepared,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    lse: torch.Tensor,
    slopes: torch.Tensor | None = None,
) -> Fields:
    transport, arena = _way(prepared, prepared.backward, dout.device)
    algebra = backward_algebra(prepared, dout, q, k, v, read, lse, slopes, arena)
    _execute(prepared, algebra, transport)
    return *algebra.result("dq"), *algebra.result("dkv")


def _captured_or_not(prepared: Prepared, memory: MemoryPlan, run: Callable[..., Fields], inputs: Fields) -> Fields:
    """Run, or replay where graphs were asked for and the caller is not capturing one of its own."""
    if not prepared.request.cuda_graph or torch.cuda.is_current_stream_capturing():
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
    prepared: Prepared, memory: MemoryPlan, home: dict[str, Fields], slopes: torch.Tensor | None, arena: Arena
) -> Tensors:
    request = prepared.request
    options: dict[str, Any] = {name: getattr(request, name) for name in ("softmax_scale", "softcap", "deterministic")}
    forward = memory is prepared.forward
    if slopes is not None:
        options["bias"] = GlobalBias(slopes, memory, prepared.rank_plan.tokens[0 if forward else 1])
    return Tensors(memory, prepared.kernel, home, arena, **options)


def _way(prepared: Prepared, memory: MemoryPlan, device: torch.device) -> tuple[Transport, Arena]:
    """How messages move, and the memory in which they land."""
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
