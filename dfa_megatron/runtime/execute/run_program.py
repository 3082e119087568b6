"""Run one rank's program over a transport, and show where in the plan an error happened."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dfa_megatron.kernels.tape import call_recorded
from dfa_megatron.plan.interpret import Algebra, rank_loop
from dfa_megatron.plan.language.program import Step
from dfa_megatron.runtime.comm.transport import Moving, Recv, Send, Transport
from dfa_megatron.runtime.execute.bound import Failed
from dfa_megatron.runtime.execute.tensors import Tensors


def execute(tensors: Tensors, algebra: Algebra, transport: Transport, failed: Failed) -> None:
    """Run a program to its end.

    Args:
        tensors: this rank's memory, with the program.
        algebra: does the steps' work: `tensors`, or a measurement around it.
        transport: moves the messages.
        failed: makes the error of a step.

    Raises:
        ExecutionError: a step failed. The group must be considered lost.
    """
    transport.start()
    number, phase, ranges = 0, tensors.program.phase.name, _ranges(tensors.device)
    _marked(ranges.open, f"dfa {phase}")
    try:
        for kind, number, step in rank_loop(tensors.program, algebra):
            if kind == "post":
                if number:
                    transport.computed(number - 1)
                    _marked(ranges.close)
                _marked(ranges.open, f"dfa {phase} step {number}")
                if step.sends or step.receives:
                    receives = [Recv(message.peer, tensors.incoming(message)) for message in step.receives]
                    transport.post(step.after, functools.partial(_sends, tensors, number, step), receives)
            elif step.sends or step.receives:
                transport.land()
        transport.finish()
        _marked(ranges.close)
        _marked(ranges.close)
    except Exception as error:
        raise failed(number, error) from error


def _sends(tensors: Tensors, number: int, step: Step, moving: Moving) -> list[Send]:
    with moving():
        return [
            Send(message.peer, tensors.outgoing(message), tensors.memory.offsets[number, message.peer])
            for message in step.sends
        ]


def _marked(mark: Callable[..., object], *name: str) -> None:
    """Open or close a range, and have a replay do so too."""
    if mark is not _no_range:
        call_recorded(functools.partial(mark, *name))


class _Ranges:
    """Named ranges for NVIDIA's profilers, around each phase and each of its steps."""

    open = staticmethod(torch.cuda.nvtx.range_push)
    close = staticmethod(torch.cuda.nvtx.range_pop)


def _no_range(*name: str) -> None:
    pass


class _NoRanges:
    """The same for a CPU, which has no such profiler."""

    open = close = staticmethod(_no_range)


def _ranges(device: torch.device) -> _Ranges | _NoRanges:
    return _Ranges() if device.type == "cuda" else _NoRanges()
