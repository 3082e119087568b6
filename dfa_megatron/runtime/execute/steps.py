"""Run one rank's program over a transport, and show where in the plan an error happened."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dfa_megatron.errors import ExecutionError
from dfa_megatron.plan.interpret import rank_loop
from dfa_megatron.plan.language.program import Step
from dfa_megatron.runtime.comm.communicator import Parcel
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.execute.tensors import Tensors


def execute(algebra: Tensors, transport: Transport, picture: Callable[[int], str]) -> None:
    """Run the algebra's program to its end.

    Args:
        algebra: this rank's memory.
        transport: moves the messages.
        picture: the plan's grid with a step of this rank marked, for the error message.

    Raises:
        ExecutionError: anything went wrong in a step; the group must be considered lost.
    """
    transport.start()
    number, phase, ranges = 0, algebra.program.phase.name, _ranges(algebra)
    ranges.open(f"dfa {phase}")
    try:
        for kind, number, step in rank_loop(algebra.program, algebra):
            if kind == "post":
                if number:
                    transport.computed(number - 1)
                    ranges.close()
                ranges.open(f"dfa {phase} step {number}")
                receives = [Parcel(message.peer, algebra.incoming(message)) for message in step.receives]
                transport.post(step.after, lambda number=number, step=step: _sends(algebra, number, step), receives)  # type: ignore[misc]
            else:
                transport.land()
        transport.finish()
        ranges.close()
        ranges.close()
    except Exception as error:
        place = f"rank {algebra.program.rank}, step {number} of a distributed {phase}"
        raise ExecutionError(f"{place} failed: {error}\n{picture(number)}") from error


def _sends(algebra: Tensors, number: int, step: Step) -> list[Parcel]:
    return [
        Parcel(message.peer, algebra.outgoing(message), algebra.memory.offsets[number, message.peer])
        for message in step.sends
    ]


class _Ranges:
    """Named ranges for NVIDIA's profilers, around each phase and each step of it."""

    open = staticmethod(torch.cuda.nvtx.range_push)
    close = staticmethod(torch.cuda.nvtx.range_pop)


class _NoRanges:
    """On a CPU there is no such profiler."""

    def open(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


def _ranges(algebra: Tensors) -> _Ranges | _NoRanges:
    return _Ranges() if algebra.device.type == "cuda" else _NoRanges()
