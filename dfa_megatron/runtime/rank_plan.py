"""What one rank runs for one attention: its programs and their memory, worked out from what all ranks know alike."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dfa_megatron.kernels.api import Form, form_of
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.cost.hardware import Hardware
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.lowering.positions import Tokens, tokens
from dfa_megatron.plan.proof.check import check
from dfa_megatron.runtime.execute.memory_plan import MemoryPlan, plan_memory
from dfa_megatron.runtime.execute.wire_format import Format
from dfa_megatron.runtime.request import Request

logger = logging.getLogger(__name__)

_KEPT = 256
"""Rank plans that were made ahead and are kept per process: a few packs ahead, and for each a few kinds of layers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan depends on; equal problems give equal plans on every rank.

    asks: a request with defaults for what plans do not depend on (see `Request.for_plan`). ranks: of the plan.
    local_length: tokens of each. shape, hardware: what "auto" decides by.
    """

    asks: Request
    ranks: int
    local_length: int
    shape: AttentionShape
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank runs.

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
        return planned(self.problem)[0]


@lru_cache(maxsize=16)  # every rank's programs: with new documents in every batch few come again
def planned(problem: Problem) -> tuple[AttentionPlan, tuple[Program, ...], tuple[Program, ...]]:
    """The checked plan of a problem and its programs for every rank, forward and backward.

    Raises:
        UnsupportedError: no schedule serves the problem.
    """
    batch = problem.shape.batch
    plan = make_plan(
        problem.asks.mask(problem.ranks * problem.local_length),
        problem.ranks,
        schedule=problem.asks.schedule,
        layout=problem.asks.layout,
        shape=problem.shape,
        hardware=problem.hardware,
    )
    return plan, tuple(check(plan.forward, batch)), tuple(check(plan.backward, batch))


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
    plan, forward, backward = planned(problem)
    forms = forms_of(forward, backward)
    sizes = format_for(forms)
    memories = plan_memory(forward, rank, sizes), plan_memory(backward, rank, sizes)
    batch = problem.shape.batch
    rows = tokens(plan.forward, forward[rank], batch), tokens(plan.backward, backward[rank], batch)
    return RankPlan(problem, rank, plan.schedule, plan.digest, forms, sizes, *memories, rows)


_ahead: OrderedDict[tuple[Problem, int], RankPlan] = OrderedDict()


def keep(known: RankPlan) -> None:
    """Have a rank plan at hand for when its problem comes up."""
    _ahead[known.problem, known.rank] = known
    if len(_ahead) > _KEPT:
        _ahead.popitem(last=False)


def rank_plan(problem: Problem, rank: int, format_for: Callable[[frozenset[Form]], Format]) -> RankPlan:
    """The one at hand, or a new one; arguments and errors as for `work_out`."""
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
