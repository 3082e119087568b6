"""Plan a program's memory for tensors of one format, once, so that a call only allocates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.landings import Landings, landings_of
from dfa_megatron.plan.lowering.positions import Tokens, tokens_of
from dfa_megatron.runtime.execute.merge_plan import BufferMerges, plan_merges
from dfa_megatron.runtime.execute.wire_format import Format, Placed, aligned

Offsets = dict[tuple[int, int], tuple[int, ...]]
"""(step, peer) of a message this rank sends -> where in the peer's arena each of its tensors goes, in bytes."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MemoryPlan:
    """The memory of one rank's program.

    arena_bytes: the largest arena that any rank needs for what lands there: equal on all ranks.
    landings: buffer -> where its tensors lie in the arena, by name.
    offsets: where this rank's messages go in the arenas of their receivers.
    tokens: what the rows are that kernels read, for kernels that must know.
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
    tokens: Tokens
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
        tokens: Tokens,
        *,
        ragged: bool,
    ) -> MemoryPlan:
        """Return the plan with everything that follows from the program alone. ragged: see `Segments`."""
        sent = Counter[str]()
        for message in program.sends:
            for name, rows in message.signature:
                sent[name] += rows
        return cls(
            program,
            format,
            arena_bytes,
            landings,
            offsets,
            tokens,
            plan_merges(program),
            tuple(
                tuple(Segments(call.segments, call.q.rows, call.kv.rows, ragged=ragged) for call in step.calls)
                for step in program.steps
            ),
            frozenset(sent),
            sum(len(step.calls) for step in program.steps),
            len(program.sends),
            format.nbytes(tuple(sent.items())),
        )


def plan_memory(plan: Plan, program: Program, format: Format) -> MemoryPlan:
    """Plan the memory of one rank's program; the landings of all ranks say where its messages go."""
    landings = landings_of(plan, format.batch)
    row_bytes = {name: format.row_bytes(name) for _, name in (*plan.phase.reads, *plan.phase.writes)}
    arenas = [_arena(one, row_bytes) for one in landings]
    own, starts = landings[program.rank], arenas[program.rank][1]
    places = {number: _places(own, starts, number, format) for number in starts}
    offsets: Offsets = {}
    for number, step in enumerate(program.steps):
        for message in step.sends:
            theirs, starts = landings[message.peer], arenas[message.peer][1]
            regions = [theirs.regions[number, program.rank, at] for at in range(len(message.parts))]
            lands = {
                buffer: _places(theirs, starts, buffer, format) for buffer in {region.buffer for region in regions}
            }
            offsets[number, message.peer] = tuple(
                place.start + region.lo * row
                for region in regions
                for place, row in zip(lands[region.buffer][region.name], row_bytes[region.name], strict=True)
            )
    largest = max(nbytes for nbytes, _ in arenas)
    tokens, ragged = tokens_of(plan, program.rank, format.batch), len(plan.mask.tiles) > 1
    return MemoryPlan.of(program, format, largest, places, offsets, tokens, ragged=ragged)


def _arena(landings: Landings, row_bytes: dict[str, tuple[int, ...]]) -> tuple[int, dict[int, int]]:
    """Return (bytes, buffer -> its first byte) of the slots that messages land in; no accumulator is there."""
    sizes: dict[int | None, int] = {}
    for buffer in landings.buffers:
        size = sum(aligned(rows * one) for name, rows in buffer.parts for one in row_bytes[name])
        sizes[buffer.slot] = max(sizes.get(buffer.slot, 0), size)
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    return sum(sizes.values()), {
        number: starts[buffer.slot] for number, buffer in enumerate(landings.buffers, len(landings.own))
    }


def _places(landings: Landings, starts: dict[int, int], number: int, format: Format) -> dict[str, tuple[Placed, ...]]:
    """Return where the tensors of a buffer lie in its rank's arena, by name."""
    return format.places(landings.buffers[number - len(landings.own)].parts, starts[number])
