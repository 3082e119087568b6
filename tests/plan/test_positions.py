"""Which tokens a rank's kernels read: what rows are told to be is what the checker's sets say they are."""

from __future__ import annotations

import random

import pytest

from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Program, Region
from dfa_megatron.plan.lowering.landings import landings_of, tokens_of
from dfa_megatron.plan.proof.check import carried, check, prove
from dfa_megatron.plan.proof.set_algebra import Sets
from tests.support.plan_cases import every_mask, heterogeneous_masks, plan_of, plans


class Compared(Sets):
    """The checker's rank, which compares what each call reads."""

    def __init__(self, plan: Plan, program: Program) -> None:
        super().__init__(plan, program)
        self.rows = {
            where: [token for span in spans for token in range(span.lo, span.hi)]
            for where, spans in tokens_of(landings_of(plan)[program.rank]).items()
        }
        self.apart = 0

    def compute(self, call: Call) -> None:
        q, kv = self.compared(call.q), [token for region in call.kv for token in self.compared(region)]
        for s in call.segments:
            self.apart += any(
                rows != list(range(rows[0], rows[0] + len(rows)))
                for rows in (q[s.q_lo : s.q_hi], kv[s.kv_lo : s.kv_hi])
            )
        super().compute(call)

    def compared(self, region: Region) -> list[int]:
        found = self.rows[region.buffer, region.name][region.lo : region.hi]
        held = self._read(region).tokens
        want = [row + shift for span, shift in sorted(held) for row in _in(span, region)]
        assert found == want
        assert len(found) == region.rows
        return found


def _in(span: Span, region: Region) -> range:
    return range(max(span.lo, region.lo), min(span.hi, region.hi))


def compare(plan: Plan) -> int:
    """How many segments of calls have rows of tokens that do not follow one another."""
    programs = check(plan)
    algebras = [Compared(plan, program) for program in programs]
    for algebra in algebras:
        prove(algebra, landings_of(plan)[algebra.program.rank].messages, carried(plan))
    return sum(algebra.apart for algebra in algebras)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_are_the_tokens_that_the_checker_finds_in_them(ranks: int) -> None:
    draw = random.Random(ranks)
    for case in (*every_mask(4 * ranks, draw), *heterogeneous_masks(4 * ranks, draw)):
        for _, plan in plans(case, ranks):
            compare(plan)


@pytest.mark.parametrize("name", ["zigzag", "load_balanced"])
def test_fused_calls_do_have_rows_of_tokens_that_lie_apart(name: str) -> None:
    draw, apart = random.Random(name), 0
    for case in (*every_mask(48, draw), *heterogeneous_masks(48, draw)):
        plan = plan_of(name, case.mask, 4)
        apart += compare(plan.forward) + compare(plan.backward)
    assert apart > 0
