"""Make one rank's programs and their memory for one attention, from facts that all ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.geometry import joined_spans
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, Plan
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.landings import Arenas, Landings, landings_of, place
from dfa_megatron.plan.lowering.lower import lower
from dfa_megatron.plan.schedules.load_balanced import layout_of
from dfa_megatron.runtime.execute.wire_format import Format, Placed
from dfa_megatron.runtime.problem import Problem


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
    format: Format
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


def plan_memory(program: Program, landings: Sequence[Landings], format: Format) -> MemoryPlan:
    """Plan the memory of one rank's program, and prove where its messages lie. landings: of all ranks."""
    plan = landings[0].plan
    from dfa_megatron.plan.proof.check import prove_places

    row_bytes = {name: format.row_bytes(name) for _, name in (*plan.phase.reads, *plan.phase.writes)}
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
        format,
        places.nbytes,
        {
            number: {
                name: format.placed(name, rows, places.starts[number][name])
                for name, rows in program.buffers[number].parts
            }
            for number in places.starts
        },
        places.sent,
        tuple(
            tuple(Segments(call.segments, call.q.rows, call.kv.rows, ragged=ragged) for call in step.calls)
            for step in program.steps
        ),
        frozenset(sent),
        sum(len(step.calls) for step in program.steps),
        len(program.sends),
        format.nbytes(tuple(sent.items())),
    )


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's programs."""

    problem: Problem
    rank: int
    schedule: str
    digest: str
    forward: MemoryPlan
    backward: MemoryPlan

    @property
    def plan(self) -> AttentionPlan:
        """The whole plan, for pictures and reports; made again where it is not at hand."""
        return planned(self.problem)


@lru_cache(maxsize=16)  # with new documents in every batch few come again
def planned(problem: Problem) -> AttentionPlan:
    """Return the plan of a problem. A caller's plan is proved for all ranks.

    Raises:
        UnsupportedError: no schedule serves the problem, or the caller's plan does not fit it.
        PlanError: the caller's plan is wrong; shows where.
    """
    asks, mask = problem.asks, problem.mask
    if asks.plan is not None:
        from dfa_megatron.plan.proof.check import check_plan

        _refuse_plan(asks.plan, problem)
        check_plan(asks.plan, batch=problem.shape.batch)
        return asks.plan
    return make_plan(
        mask,
        problem.ranks,
        schedule=problem.schedule,
        layout=asks.layout,
        shape=problem.shape,
        hardware=problem.hardware,
    )


def _refuse_plan(plan: AttentionPlan, problem: Problem) -> None:
    """Refuse a caller's plan that is not one of these ranks and tokens; `check` then proves that it is right.

    Raises:
        UnsupportedError: says what does not fit.
    """
    what, layout, mask = f"the plan {plan}", problem.asks.layout, plan.forward.mask
    if (plan.forward.phase, plan.backward.phase) != (FORWARD, BACKWARD) or plan.backward.mask != mask:
        why = "its phases are not a forward and the backward of the same mask"
        raise UnsupportedError(what, why, "both phases of one make_plan")
    for phase in (plan.forward, plan.backward):
        if phase.ranks != problem.ranks:
            why = f"it is for {phase.ranks} ranks, and {problem.ranks} share the sequence"
            raise UnsupportedError(what, why, f"make_plan(mask, {problem.ranks})")
        held = layout_of(layout, mask.balanced_by or mask, problem.ranks) if isinstance(layout, str) else layout
        if any(
            joined_spans(phase.layout.spans(rank)) != joined_spans(held.spans(rank)) for rank in range(problem.ranks)
        ):
            why = f"it places tokens by layout {plan.layout!r}, and the ranks hold them by {str(layout)!r}"
            raise UnsupportedError(what, why, f"layout={plan.layout!r} and tensors of such tokens")
    if problem.schedule not in ("auto", plan.schedule):
        raise UnsupportedError(f"schedule={problem.schedule!r} with a plan", "the plan says it", "schedule='auto'")


def rank_plan(problem: Problem, rank: int) -> RankPlan:
    """Plan for all ranks; lower, prove and place for one.

    The proof covers the plan, and this rank's programs. All ranks hear of an error on any when they agree.

    Raises:
        UnsupportedError: no schedule serves the problem.
        PlanError: the plan, or a program, is wrong.
    """
    plan = planned(problem)
    forward, backward = (_placed(phase, rank, problem) for phase in plan.phases)
    return RankPlan(problem, rank, plan.schedule, plan.digest, forward, backward)


def _placed(plan: Plan, rank: int, problem: Problem) -> MemoryPlan:
    from dfa_megatron.plan.proof.check import check_programs

    landings = landings_of(plan, problem.format.batch)
    program = lower(landings[rank], bands=problem.bands, repeats=problem.repeats)
    check_programs(landings, [program])
    return plan_memory(program, landings, problem.format)
