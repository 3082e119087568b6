"""Plan the memory of one rank's programs: where messages land, and where each goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dfa_megatron.kernels.segments import Segments, Split
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Program
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.kernel_calls import Launching
from dfa_megatron.plan.lowering.landings import Arenas, Landings, landings_of, place
from dfa_megatron.plan.lowering.lower import lower
from dfa_megatron.runtime.execute.wire_format import Placed, placed_at


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """The memory of one rank's program.

    arena_bytes: the largest arena that any rank needs for what lands there: equal on all ranks.
    landings: buffer -> where its tensors lie in the arena, by name.
    offsets: (step, peer) of a message that this rank sends -> where in the peer's arena each of its tensors goes.
    segments: of each step's calls, in their order, as kernels take them.
    sent: names of which this rank sends its own rows.
    calls, messages, message_bytes: how many kernel calls this rank makes, and what it sends.
    """

    program: Program
    sizes: Sizes
    arena_bytes: int
    landings: dict[int, dict[str, tuple[Placed, ...]]]
    offsets: dict[tuple[int, int], tuple[int, ...]]
    segments: tuple[tuple[Segments, ...], ...]
    sent: frozenset[str]
    calls: int
    messages: int
    message_bytes: int

    def landed(self, arena: torch.Tensor) -> dict[int, dict[str, tuple[torch.Tensor, ...]]]:
        """Return the tensors of every received buffer in the bytes of an arena, by name."""
        return {
            number: {name: tuple(place.view(arena) for place in placed) for name, placed in landing.items()}
            for number, landing in self.landings.items()
        }


def plan_memory(program: Program, landings: Sequence[Landings], sizes: Sizes) -> MemoryPlan:
    """Plan the memory of one rank's program, and prove where its messages lie. landings: of all ranks."""
    plan = landings[0].plan
    from dfa_megatron.plan.proof.check import prove_places

    row_bytes = {name: sizes.row_bytes(name) for _, name in (*plan.phase.reads, *plan.phase.writes)}
    arenas = Arenas(landings, row_bytes)
    places = place(program, arenas)
    prove_places(program, places, arenas)
    sent = Counter[str]()
    for message in program.sends:
        for name, rows in message.signature:
            sent[name] += rows
    ragged = len(plan.mask.tiles) > 1
    return MemoryPlan(
        program,
        sizes,
        places.nbytes,
        {
            number: {
                name: placed_at(sizes, name, rows, places.starts[number][name])
                for name, rows in program.buffers[number].parts
            }
            for number in places.starts
        },
        places.sent,
        tuple(tuple(_segments(call, ragged=ragged) for call in step.calls) for step in program.steps),
        frozenset(sent),
        sum(len(step.calls) for step in program.steps),
        len(program.sends),
        sum(rows * sum(row_bytes[name]) for name, rows in sent.items()),
    )


def _segments(call: Call, *, ragged: bool) -> Segments:
    q_len, kv_len = call.q.rows, call.kv.rows
    split = Split.of(call.launches, q_len, kv_len, ragged=ragged)
    return Segments(call.segments, q_len, kv_len, ragged=ragged, split=split)


def placed(plan: Plan, rank: int, sizes: Sizes, launching: Launching) -> MemoryPlan:
    """Lower a phase for one rank, prove its program and place its messages. All ranks hear of an error on any.

    Args:
        plan: the phase for all ranks.
        rank: this one.
        sizes: of its tensors.
        launching: decides the calls of the kernel, and their launches.

    Raises:
        PlanError: the plan, or the program, is wrong.
    """
    from dfa_megatron.plan.proof.check import check_programs

    landings = landings_of(plan, sizes.batch)
    program = lower(landings[rank], launching)
    check_programs(landings, [program])
    return plan_memory(program, landings, sizes)
