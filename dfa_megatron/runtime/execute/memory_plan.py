"""Plan a program's memory for tensors of one format, once, so that a call only allocates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.program import Message, Program
from dfa_megatron.runtime.execute.merge_plan import BufferMerges, plan_merges
from dfa_megatron.runtime.execute.wire_format import Format, Placed

Offsets = dict[tuple[int, int], tuple[int, ...]]
"""(step, peer) of a message this rank sends -> where in the peer's arena each of its tensors goes, in bytes."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MemoryPlan:
    """The memory of one rank's program.

    arena_bytes: the largest arena that any rank needs for what lands there: equal on all ranks.
    landings: buffer -> where its tensors lie in the arena, by name.
    offsets: where this rank's messages go in the arenas of their receivers.
    merges: how each accumulator is filled.
    segments: of each step's calls, in their order, as kernels take them.
    sent: names of which this rank sends its own rows.
    calls, messages, message_bytes: how many kernel calls this rank makes, and what it sends.
    """

    program: Program
    format: Format
    arena_bytes: int
    landings: dict[int, dict[str, tuple[Placed, ...]]]
    offsets: Offsets
    merges: dict[int, BufferMerges]
    segments: tuple[tuple[Segments, ...], ...]
    sent: frozenset[str]
    calls: int
    messages: int
    message_bytes: int

    @classmethod
    def of(
        cls,
        program: Program,
        format: Format,
        arena_bytes: int,
        landings: dict[int, dict[str, tuple[Placed, ...]]],
        offsets: Offsets,
    ) -> MemoryPlan:
        """Return the plan with everything that follows from the program alone."""
        return cls(
            program,
            format,
            arena_bytes,
            landings,
            offsets,
            plan_merges(program),
            tuple(
                tuple(Segments(call.segments, call.q.rows, call.kv.rows) for call in step.calls)
                for step in program.steps
            ),
            frozenset(regions[0].name for message in program.sends for regions in message.parts),
            sum(len(step.calls) for step in program.steps),
            len(program.sends),
            sum(format.nbytes(message.signature) for message in program.sends),
        )


def plan_memory(programs: tuple[Program, ...] | list[Program], rank: int, format: Format) -> MemoryPlan:
    """Plan the memory of one rank's program; the other ranks' programs say where its messages go."""
    program = programs[rank]
    slots, landings = _arena(program, format)
    arenas = {rank: (slots, landings)}
    offsets: Offsets = {}
    for number, step in enumerate(program.steps):
        for message in step.sends:
            peer = message.peer
            if peer not in arenas:
                arenas[peer] = _arena(programs[peer], format)
            theirs = next(m for m in programs[peer].steps[number].receives if m.peer == rank)
            offsets[number, peer] = tuple(place.start for place in _places(theirs, arenas[peer][1]))
    largest = max(_arena(other, format)[0] for other in programs)
    return MemoryPlan.of(program, format, largest, landings, offsets)


def _arena(program: Program, format: Format) -> tuple[int, dict[int, dict[str, tuple[Placed, ...]]]]:
    """Return (bytes, buffer -> places of its tensors) of the slots that messages land in; no accumulator is there."""
    sizes: dict[int, int] = {}
    inside: dict[int, dict[str, tuple[Placed, ...]]] = {}
    for number, buffer in enumerate(program.buffers):
        if buffer.slot is not None and not buffer.accumulates:
            inside[number], size = format.places(buffer.parts)
            sizes[buffer.slot] = max(sizes.get(buffer.slot, 0), size)
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    landings = {
        number: {
            name: tuple(place.moved(starts[program.buffers[number].slot]) for place in placed)  # type: ignore[index]
            for name, placed in places.items()
        }
        for number, places in inside.items()
    }
    return sum(sizes.values()), landings


def _places(message: Message, landings: dict[int, dict[str, tuple[Placed, ...]]]) -> tuple[Placed, ...]:
    """Return the places of a received message's tensors, in the order of sending."""
    return tuple(
        place.rows(region.lo, region.hi)
        for (region,) in message.parts
        for place in landings[region.buffer][region.name]
    )
