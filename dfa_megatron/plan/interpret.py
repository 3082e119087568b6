"""Run a rank's program over an algebra, in one generator for every kind of value.

Sets of tiles make it the checker, and clocks the simulator. Tensors handed over in memory run all ranks in one process,
and tensors over a network make it the runtime. The loop that is verified is the loop that runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.program import Call, Merge, Message, Program, Step


class Algebra(Protocol):
    """The values of one rank, and what a step does to them."""

    def begin(self, step: int) -> None:
        """A step starts; what is received in it may be overwritten from now on."""
        ...

    def compute(self, call: Call) -> None:
        """Run one kernel call and merge its results into its writes."""
        ...

    def merge(self, merge: Merge) -> None:
        """Merge a landed partial into an accumulator."""
        ...

    def end(self, step: int) -> None:
        """The step's compute and merges are issued."""
        ...


def rank_loop(program: Program, algebra: Algebra) -> Generator[tuple[str, int, Step], None, None]:
    """Run one rank, and yield ("post" or "land", the step's number, the step).

    The driver moves the messages: it starts them at "post" and finishes them at "land".
    """
    for number, step in enumerate(program.steps):
        algebra.begin(number)
        yield "post", number, step
        for call in step.calls:
            algebra.compute(call)
        yield "land", number, step
        for merge in step.merges:
            algebra.merge(merge)
        algebra.end(number)


class HandOver(Algebra, Protocol):
    """An algebra whose messages can be handed over inside one process."""

    def take(self, step: int, message: Message) -> Any:
        """Return the payload of a message this rank sends, as it is before the step's compute."""
        ...

    def land(self, step: int, message: Message, payload: Any) -> None:
        """Put a received payload where the message says."""
        ...


def run_together(programs: Sequence[Program], algebras: Sequence[HandOver]) -> None:
    """Run all ranks in lockstep in this process, handing each payload over.

    Raises:
        PlanError: a message that nobody sends or nobody receives; programs lowered from one plan have none.
    """
    loops = [rank_loop(program, algebra) for program, algebra in zip(programs, algebras, strict=True)]
    events = {rank: event for rank, loop in enumerate(loops) if (event := next(loop, None))}
    while events:
        wire: dict[tuple[int, int], Any] = {}
        for rank, (_, number, step) in events.items():
            for message in step.sends:
                wire[rank, message.peer] = algebras[rank].take(number, message)
        for rank in events:
            next(loops[rank])
        for rank, (_, number, step) in events.items():
            for message in step.receives:
                if (message.peer, rank) not in wire:
                    raise PlanError(f"R5: at step {number} rank {rank} waits for {message.peer}, which sends nothing")
                algebras[rank].land(number, message, wire.pop((message.peer, rank)))
        if wire:
            raise PlanError(f"R5: messages (source, destination) that nobody receives: {sorted(wire)}")
        events = {rank: event for rank in events if (event := next(loops[rank], None))}
