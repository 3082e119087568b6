"""The checker is exact: of thousands of random mutants it accepts those that compute attention, and no other."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.proof.check import check
from tests.support import mutants, oracle
from tests.support.plan_cases import every_mask, plans
from tests.support.plan_dense import reference
from tests.support.workers import by_turns


def accepts(plan: Plan) -> bool:
    try:
        check(plan)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("ranks", by_turns([2, 3, 4, 5, 6]))
def test_the_checker_accepts_a_mutant_if_and_only_if_it_is_numerically_right(ranks: int) -> None:
    rng = random.Random(10 + ranks)
    verdicts: Counter[bool] = Counter()
    for case in every_mask(2 * ranks * rng.randint(1, 2), rng):
        sees = case.dense
        expected = reference(sees, seed=ranks)
        candidates = list(plans(case, ranks))
        for _ in range(60):
            name, plan = rng.choice(candidates)
            changes, mutant = mutants.mutate(plan, rng)
            verdict = oracle.is_right(mutant, sees, expected)
            assert accepts(mutant) == verdict, f"{name} {plan.phase.name} of {case.mask.name}: {changes}\n{mutant}"
            verdicts[verdict] += 1
    assert min(verdicts[True], verdicts[False]) > 60, "the mutants should be of both kinds"


@pytest.mark.parametrize("change", [change for change in mutants.CHANGES if change is not mutants.later_from])
def test_every_kind_of_change_breaks_some_plan(change: mutants.Change) -> None:
    """`later_from` is left out: it only moves a right plan in time."""
    rng = random.Random(7)
    case = every_mask(24, rng)[0]
    candidates = list(plans(case, 4))
    assert not all(accepts(change(rng.choice(candidates)[1], rng)) for _ in range(60))
