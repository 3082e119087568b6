"""Every schedule is exact: the checker accepts its plans, and an independent reading of them gives dense attention."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dfa_megatron.plan.proof.check import check
from tests.support import oracle
from tests.support.plan_cases import WAYS, Case, every_mask, heterogeneous_masks, plan_of, plans
from tests.support.plan_dense import reference
from tests.support.workers import by_turns

ROUTED = tuple(way for way in WAYS if way != "ring")
"""Those whose routes may know nodes."""


def are_exact(cases: Sequence[Case], ranks: int, node: int | None = None) -> set[str]:
    """Check every plan of every schedule that serves; return the schedules."""
    seen = set()
    for case in cases:
        sees = case.dense
        expected = reference(sees, seed=ranks)
        for name, plan in plans(case, ranks, node, WAYS if node is None else ROUTED):
            check(plan)
            assert oracle.is_right(plan, sees, expected), f"{name} {plan.phase.name} of {case.mask.name}"
            seen.add(name)
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 9, 13])
def test_every_schedule_is_exact_on_every_mask_it_supports(ranks: int) -> None:
    rng = random.Random(ranks)
    causal, *others = every_mask(2 * ranks * rng.randint(1, 3 if ranks < 6 else 1), rng)
    assert are_exact([causal, *by_turns(others if ranks < 6 else rng.sample(others, 4))], ranks) == set(WAYS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_schedule_is_exact_on_heterogeneous_masks(ranks: int) -> None:
    rng = random.Random(50 + ranks)
    are_exact(by_turns(heterogeneous_masks(2 * ranks * rng.randint(1, 3 if ranks < 5 else 1), rng)), ranks)


@pytest.mark.parametrize(("ranks", "node"), [(2, 1), (4, 2), (5, 2), (9, 4)])
def test_gateways_are_exact_on_every_mask(ranks: int, node: int) -> None:
    rng = random.Random(ranks)
    causal, *others = [*every_mask(2 * ranks, rng), *heterogeneous_masks((4 if ranks < 9 else 2) * ranks, rng)]
    assert are_exact([causal, *by_turns(others if ranks < 9 else rng.sample(others, 8))], ranks, node) == set(ROUTED)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 1), (3, 1), (5, 1), (8, 1), (2, 3), (3, 3), (5, 3)])
def test_schedules_are_exact_where_half_chunks_are_unequal_or_empty(ranks: int, tokens: int) -> None:
    are_exact(by_turns(every_mask(ranks * tokens, random.Random(100 * ranks + tokens))), ranks)


@pytest.mark.parametrize("schedule", WAYS)
def test_many_ranks_are_planned_and_checked(schedule: str) -> None:
    plan = plan_of(schedule, every_mask(32 * 4, random.Random(0))[0].mask, 32)
    check(plan.forward)
    check(plan.backward)
