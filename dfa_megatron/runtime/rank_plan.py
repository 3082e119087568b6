"""Make one rank's programs and their memory for one attention, from facts that all ranks share."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import lru_cache

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.geometry import joined_spans
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, Plan
from dfa_megatron.plan.lowering.landings import landings_of
from dfa_megatron.plan.lowering.lower import lower
from dfa_megatron.plan.proof.check import check_plan, check_programs
from dfa_megatron.plan.schedules.load_balanced import layout_of
from dfa_megatron.plan.uncollected import uncollected
from dfa_megatron.runtime.execute.memory_plan import MemoryPlan, plan_memory
from dfa_megatron.runtime.problem import Problem

logger = logging.getLogger(__name__)

_KEPT = 256
"""Rank plans that were made ahead and are kept per process: a few packs ahead, and for each a few kinds of layers."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's programs; plain data, which travels between processes of a host by pickle."""

    problem: Problem
    rank: int
    schedule: str
    digest: str
    forward: MemoryPlan
    backward: MemoryPlan

    def use(self) -> None:
        """Register the plan in this process. Plans that no call uses are dropped when newer ones have come."""
        _ahead[self.problem, self.rank] = self
        if len(_ahead) > _KEPT:
            _ahead.popitem(last=False)

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
        held = layout_of(layout, mask.balanced_by or mask, problem.ranks)
        if any(
            joined_spans(phase.layout.spans(rank)) != joined_spans(held.spans(rank)) for rank in range(problem.ranks)
        ):
            why = f"it places tokens by layout {plan.layout!r}, and the ranks hold them by {layout!r}"
            raise UnsupportedError(what, why, f"layout={plan.layout!r} and tensors of such tokens")
    if problem.schedule not in ("auto", plan.schedule):
        raise UnsupportedError(f"schedule={problem.schedule!r} with a plan", "the plan says it", "schedule='auto'")


def work_out(problem: Problem, rank: int) -> RankPlan:
    """Plan for all ranks; lower, prove and place for one.

    The proof covers the plan, and this rank's programs. All ranks hear of an error on any when they agree.

    Raises:
        UnsupportedError: no schedule serves the problem.
        PlanError: the plan, or a program, is wrong.
    """
    with uncollected():
        plan = planned(problem)
        forward, backward = (_placed(phase, rank, problem) for phase in plan.phases)
    return RankPlan(problem, rank, plan.schedule, plan.digest, forward, backward)


def _placed(plan: Plan, rank: int, problem: Problem) -> MemoryPlan:
    landings = landings_of(plan, problem.format.batch)
    program = lower(landings[rank], bands=problem.bands)
    check_programs(landings, [program])
    return plan_memory(program, landings, problem.format)


_ahead: OrderedDict[tuple[Problem, int], RankPlan] = OrderedDict()


def rank_plan(problem: Problem, rank: int) -> RankPlan:
    """Return the cached rank plan, or a new one; arguments and errors as for `work_out`."""
    known = _ahead.get((problem, rank))
    if known is not None:
        return known
    ahead = next((other for other, whose in _ahead if whose == rank and other.asks == problem.asks), None)
    if ahead is not None:
        differ = [spec.name for spec in fields(Problem) if getattr(ahead, spec.name) != getattr(problem, spec.name)]
        theirs, ours = ([f"{name} {getattr(one, name)}" for name in differ] for one in (ahead, problem))
        _say_once(f"plans made ahead are for {theirs}, and calls bring {ours}: packs are planned as they come")
    return work_out(problem, rank)


@lru_cache(maxsize=16)
def _say_once(message: str) -> None:
    logger.warning(message)
