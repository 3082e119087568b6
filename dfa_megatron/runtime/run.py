"""Run a prepared attention on this rank: tensors in, tensors out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dfa_megatron.errors import ExecutionError
from dfa_megatron.kernels.leaf import without_autocast, without_functions
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.kernels.tape import Tape, recordable, signature
from dfa_megatron.names import say_once
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.bound import Bound, Recorder
from dfa_megatron.runtime.execute.memory import Fields, MemoryPlan
from dfa_megatron.runtime.execute.sinks import exact_sum, merge_sinks, sinks_gradient
from dfa_megatron.runtime.execute.tensors import Tensors, execute
from dfa_megatron.runtime.prepare import Prepared
from dfa_megatron.runtime.request import Inputs

logger = logging.getLogger(__name__)

SavedTensors = tuple[torch.Tensor | None, ...]
"""What every way of running saves for a backward, in this order: q, k, v, out, lse, sinks.

In a recompute out and lse come from the region's first pass (`remat.frames`); attention does not run.
"""

InputGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of q, k, v and sinks; the last is None without sinks."""


def algebra(prepared: Prepared, memory: MemoryPlan, inputs: Fields, arena: torch.Tensor) -> Tensors:
    """Return the memory of one rank's phase. inputs: q, k, v; or dout, q, k, v, out or -delta, lse."""
    if memory is prepared.forward:
        q, k, v = inputs
        home: dict[str, Fields] = {"q": (q,), "kv": (k, v)}
    else:
        dout, q, k, v, out, lse = inputs
        home = {"qdo": (q, dout, lse, needed_by_backward(prepared, dout, out)), "kv": (k, v)}
    return Tensors(memory, prepared.kernel, prepared.request, home, arena)


def needed_by_backward(prepared: Prepared, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return out or -delta (batch, heads, rows), whichever the kernel's backward reads beside lse.

    It is out where the kernel needs out, and where the kernel takes it, no rank is sent these rows, and calls read each
    at most twice. Otherwise compute -delta, a pass over dout and out. An `out` of three dimensions is -delta already.
    """
    if out.dim() == 3:
        return out
    memory, takes_out = prepared.backward, False
    if prepared.kernel.takes_out and not memory.sizes.wide and "qdo" not in memory.sent:
        home = memory.program.home_buffer("qdo")
        calls = [call.q.rows for step in memory.program.steps for call in step.calls if call.q.buffer == home]
        takes_out = sum(calls) <= 2 * dout.shape[1]
    return out if takes_out or memory.sizes.backward_needs == "out" else minus_delta(dout, out)


def run_forward(prepared: Prepared, inputs: Inputs, *, trains: bool = True) -> Fields:
    """Return (out, lse) of this rank's rows: out in q's dtype, lse in the accumulator's.

    q, k and v as they are after an exchange of heads may follow: a backward that gets them exchanges less.

    trains: whether a backward may follow.
    """
    q, k, v, sinks = inputs
    memory = prepared.forward
    COUNTERS.attention_forwards += 1
    COUNTERS.kernel_forwards += memory.calls
    COUNTERS.forward_messages += memory.messages
    COUNTERS.forward_bytes += memory.message_bytes
    with prepared.running.forward if trains else prepared.running.alone:
        out, lse, *exchanged = _around(prepared, memory, (q, k, v))
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return out.contiguous(), lse.contiguous(), *exchanged


def run_backward(prepared: Prepared, dout: torch.Tensor, saved: SavedTensors) -> InputGradients:
    """Return the gradients of q, k, v and sinks of this rank's rows, in their dtypes."""
    q, k, v, out, lse, sinks = saved
    assert q is not None and k is not None and v is not None and out is not None and lse is not None  # noqa: PT018
    memory = prepared.backward
    COUNTERS.attention_backwards += 1
    COUNTERS.kernel_backwards += memory.calls
    COUNTERS.backward_messages += memory.messages
    COUNTERS.backward_bytes += memory.message_bytes
    with prepared.running.backward:
        dq, dk, dv = _around(prepared, memory, (dout, q, k, v, out, lse))
    summed = functools.partial(exact_sum, prepared.over) if memory.sizes.wide else None
    dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks, summed)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


def _around(prepared: Prepared, memory: MemoryPlan, inputs: Fields) -> Fields:
    """Run a phase, around which heads are exchanged, and rows change ranks where chunks would lie on two."""
    if prepared.exchange is None and prepared.moved is None:
        return _run_or_replay(prepared, memory, inputs)
    run: Callable[[Fields], Fields] = functools.partial(_run_or_replay, prepared, memory)
    if prepared.moved is not None:
        run = functools.partial(prepared.moved.around, run)
    if prepared.exchange is not None:
        run = functools.partial(prepared.exchange.around, run)
    with without_autocast(), without_functions():
        if memory is prepared.backward and prepared.kernel.backward_needs == "delta":  # which is smaller than out
            dout, q, k, v, out, lse = inputs
            inputs = dout, q, k, v, minus_delta(dout, out), lse
        return run(inputs)


def _run_or_replay(prepared: Prepared, memory: MemoryPlan, inputs: Fields) -> Fields:
    """Run a phase: directly first, recorded next, replayed from then on, for each signature of its tensors.

    The first run of a kind compiles kernels and makes tables, so it is not recorded. Later masks, lengths, packs and
    signatures of that kind are recorded in their first run. While the caller captures a CUDA graph, nothing is recorded
    anew: the graph takes in what a replay, or a run as it stands, issues. A signature holds strides, offsets and
    alignment, the stream, the device and PyTorch's modes.
    """
    key = memory is prepared.forward, signature(inputs)
    with without_autocast(), without_functions():
        transport, arena = _way(prepared, memory, inputs[0].device)
        # A dispatch mode must see every operation, so nothing is replayed.
        if not prepared.binds or _get_current_dispatch_mode() is not None:
            return _run(prepared, memory, inputs, arena, transport)
        # Absent: not run. None: run as it stands. A text: why it cannot be replayed. A Bound: recorded.
        found = prepared.bound.get(key)
        if isinstance(found, Bound):
            return found(inputs, arena, transport, functools.partial(_failed, prepared, memory))
        kind, is_new = (prepared.kind, key[0]), key not in prepared.bound
        if is_new and len(prepared.bound) == _MOST_BOUND:
            said = "an attention meets more than %d layouts of its tensors; the others are not replayed"
            say_once(logger.info, said, _MOST_BOUND)
            return _run(prepared, memory, inputs, arena, transport)
        if isinstance(found, str) or not recordable(inputs[0].device) or (is_new and kind not in _HAVE_RUN):
            results = _run(prepared, memory, inputs, arena, transport)
            prepared.bound[key] = found
            _HAVE_RUN.add(kind)
            return results
        results, recorded = _record(prepared, memory, inputs, arena, transport)
    if isinstance(recorded, str) and not is_new:
        logger.info("this attention's host work is not recorded: %s", recorded)
    # A first run may fail to record because it compiles: the next one tries again.
    prepared.bound[key] = None if isinstance(recorded, str) and is_new else recorded
    return results


def _record(
    prepared: Prepared, memory: MemoryPlan, inputs: Fields, arena: torch.Tensor, transport: Transport
) -> tuple[Fields, Bound | str]:
    """Run a phase as it stands; return its results and the recorded run, or why it cannot be replayed."""
    given = tuple(x.detach() for x in (*inputs, arena))  # the tape tells tensors apart as objects
    with Tape(given) as tape:
        recorder = Recorder(tape, transport, arena=len(inputs))
        results = _run(prepared, memory, given[:-1], given[-1], recorder)
    return results, tape.why_not or Bound(recorder, results)


_HAVE_RUN: set[tuple[object, ...]] = set()
"""The kinds and phases that have run in this process."""
_MOST_BOUND = 8
"""Recorded runs of one prepared attention: of its phases, for each layout of the caller's tensors."""


def _run(prepared: Prepared, memory: MemoryPlan, inputs: Fields, arena: torch.Tensor, transport: Transport) -> Fields:
    """Run a phase as it stands."""
    tensors = algebra(prepared, memory, inputs, arena)
    execute(tensors, transport, functools.partial(_failed, prepared, memory))
    results = tuple(x for name in memory.program.phase.write_names for x in tensors.result(name))
    # An exchange spoils its own results.
    return results if prepared.over is None or prepared.exchange is not None else prepared.over.spoiled(*results)


_MOVES_NOTHING = Transport()


def _way(prepared: Prepared, memory: MemoryPlan, device: torch.device) -> tuple[Transport, torch.Tensor]:
    """Return the transport, and the memory that receives messages."""
    over, transport = prepared.over, _MOVES_NOTHING
    if over is not None and prepared.ranks > 1:
        transport = over.transports.get(device, prepared.transport)
        over.calls.where = transport.where
    return transport, transport.arena(memory.arena_bytes, device)


def _failed(prepared: Prepared, memory: MemoryPlan, step: int, error: Exception) -> ExecutionError:
    """Return the error of a step, with the plan's grid and this step marked."""
    rank, phase = memory.program.rank, memory.program.phase.name
    place = f"rank {rank}, step {step} of a distributed {phase}"
    return ExecutionError(f"{place} failed: {error}\n{prepared.picture(phase, step)}")
