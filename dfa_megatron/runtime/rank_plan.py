"""Make one rank's programs and their memory for one attention, from facts that all ranks share."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import Form, form_of
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.cost.hardware import Hardware
from dfa_megatron.plan.language.geometry import joined_spans
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.lowering.positions import Tokens, tokens
from dfa_megatron.plan.proof.check import check
from dfa_megatron.plan.schedules.load_balanced import layout_of
from dfa_megatron.plan.uncollected import uncollected
from dfa_megatron.runtime.execute.memory_plan import MemoryPlan, plan_memory
from dfa_megatron.runtime.execute.wire_format import Format
from dfa_megatron.runtime.request import Request

logger = logging.getLogger(__name__)

_KEPT = 256
"""Rank plans that were made ahead and are kept per process: a few packs ahead, and for each a few kinds of layers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Hold all inputs of a plan; equal problems give equal plans on every rank.

    asks: a request with defaults for fields on which no plan depends (see `Request.for_plan`). ranks: of the plan.
    local_length: tokens of each. shape, hardware: "auto" decides by these.
    """

    asks: Request
    schedule: str
    ranks: int
    local_length: int
    shape: AttentionShape
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Hold one rank's programs.

    forms: of every kernel call of any rank, so that all choose the same kernel.
    tokens: what the rows are that kernels read, forward and backward, for kernels that must know.
    """

    problem: Problem
    rank: int
    schedule: str
    digest: str
    forms: frozenset[Form]
    format: Format
    forward: MemoryPlan
    backward: MemoryPlan
    tokens: tuple[Tokens, Tokens]

    @property
    def plan(self) -> AttentionPlan:
        """The whole plan, for pictures and reports; made again where it is not at hand."""
        return planned(self.problem, self.rank)[0]


@lru_cache(maxsize=16)  # every rank's programs: with new documents in every batch few come again
def planned(problem: Problem, rank: int) -> tuple[AttentionPlan, tuple[Program, ...], tuple[Program, ...]]:
    """Return the plan of a problem and its programs for every rank, forward and backward.

    They are checked. Of the results of a schedule each rank compares its own with the mask, and all ranks hear of an
    error when they agree. Every rank checks all of a caller's plan.

    Raises:
        UnsupportedError: no schedule serves the problem, or the caller's plan does not fit it.
        PlanError: the caller's plan is wrong; shows where.
    """
    batch, asks = problem.shape.batch, problem.asks
    mask = asks.mask_over(problem.ranks * problem.local_length)
    if asks.plan is None:
        plan = make_plan(
            mask,
            problem.ranks,
            schedule=problem.schedule,
            layout=asks.layout,
            shape=problem.shape,
            hardware=problem.hardware,
        )
    else:
        plan = asks.plan
        _refuse_plan(plan, problem)
    proved = rank if asks.plan is None else None
    forward, backward = (tuple(check(phase, batch, rank=proved)) for phase in plan.phases)
    return plan, forward, backward


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


def forms_of(*programs: tuple[Program, ...]) -> frozenset[Form]:
    """The forms of every kernel call of any rank."""
    return frozenset(
        form_of(segment.band, segment.q_hi - segment.q_lo, segment.kv_hi - segment.kv_lo)
        for phase in programs
        for program in phase
        for step in program.steps
        for call in step.calls
        for segment in call.segments
    )


def work_out(problem: Problem, rank: int, format_for: Callable[[frozenset[Form]], Format]) -> RankPlan:
    """Plan, check, lower and place. `format_for` knows the tensors of a kernel that can do such forms.

    Raises:
        UnsupportedError: no schedule serves the problem, or no kernel its forms.
    """
    with uncollected():
        plan, forward, backward = planned(problem, rank)
        forms = forms_of(forward, backward)
        sizes = format_for(forms)
        memories = plan_memory(forward, rank, sizes), plan_memory(backward, rank, sizes)
        batch = problem.shape.batch
        rows = tokens(plan.forward, forward[rank], batch), tokens(plan.backward, backward[rank], batch)
    return RankPlan(problem, rank, plan.schedule, plan.digest, forms, sizes, *memories, rows)


_ahead: OrderedDict[tuple[Problem, int], RankPlan] = OrderedDict()


def keep(known: RankPlan) -> None:
    """Cache a rank plan under its problem."""
    _ahead[known.problem, known.rank] = known
    if len(_ahead) > _KEPT:
        _ahead.popitem(last=False)


def rank_plan(problem: Problem, rank: int, format_for: Callable[[frozenset[Form]], Format]) -> RankPlan:
    """Return the cached rank plan, or a new one; arguments and errors as for `work_out`."""
    known = _ahead.get((problem, rank))
    if known is None:
        return work_out(problem, rank, format_for)
    wanted = format_for(known.forms)
    if known.format != wanted:
        _say_once(f"plans made ahead are for {known.format}, and calls bring {wanted}: packs are planned as they come")
        return work_out(problem, rank, format_for)
    return known


@lru_cache(maxsize=16)
def _say_once(message: str) -> None:
    logger.warning(message)
