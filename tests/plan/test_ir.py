"""Plans as text: what is written can be read back, and what cannot be read is quoted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.ir import FORWARD, Block, Plan, Transfer
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.mask import causal, full, prefix_lm
from dfa_megatron.plan.language.text import from_text, to_text
from dfa_megatron.plan.proof.check import check
from tests.support.mutants import mutate
from tests.support.plan_cases import attention_plans, every_mask, plan_of, plans


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_plan_survives_the_trip_through_text(ranks: int) -> None:
    for case in every_mask(4 * ranks, random.Random(ranks)):
        for _, plan in attention_plans(case, ranks):
            again = from_text(to_text(plan))
            assert again == plan
            assert again.digest == plan.digest


def test_different_plans_have_different_digests() -> None:
    rng = random.Random(0)
    found: dict[str, Plan] = {}
    for case in every_mask(12, rng):
        for _, plan in plans(case, 3):
            for one in (plan, mutate(plan, rng)[1]):
                ordered = replace(one, blocks=tuple(sorted(one.blocks)), transfers=tuple(sorted(one.transfers)))
                assert found.setdefault(one.digest, ordered) == ordered
    assert len(found) > 40


def test_plans_of_masks_with_one_name_have_other_digests() -> None:
    """In ranks that hold other masks by the same name, the digest alone tells them apart."""
    masks = [replace(mask, name="mine") for mask in (full(8), prefix_lm(8, 7), causal(8), prefix_lm(8, 3))]
    empty = [Plan(mask, contiguous(8, 2), FORWARD, (), ()) for mask in (*masks, *masks)]
    assert len({plan.digest for plan in empty}) == len(masks)


def test_a_digest_does_not_depend_on_the_order_of_records() -> None:
    plan = plan_of("balanced", causal(16), 4).forward
    assert replace(plan, blocks=plan.blocks[::-1], transfers=plan.transfers[::-1]).digest == plan.digest


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"block", 0, 0, 0, 0]', '"block", 0, 0, "zero", 0]', "line 2 .*it has numbers"),
        ('"block", 0, 0, 0, 0]', '"block", 0, 0, true, 0]', "line 2 .*it has numbers"),
        ('"block", 0, 0, 0, 0]', '"block", 0, 0, 0.0, 0]', "line 2 .*it has numbers"),
        ('"block", 0, 0, 0, 0]', '"crate", 0, 0, 0, 0]', "line 2 .*there is no 'crate'"),
        ('"block", 0, 0, 0, 0]', '"block", 0, 0, 0]', "line 2 .*missing 1 required"),
        ('"move", 0, 0, 1, "kv"', '"move", 0, 0, 1, 1', "line 5 .*a move a name"),
        ('["forward", "block"', '["sideways", "block"', "line 2 .*there is no 'sideways'"),
        ('["forward", "block", 0, 0, 0, 0]', "", "line 2 "),
        ('"layout": "contiguous", ', "", "line 1 .*layout"),
        ('"mask": {', '"mask": [', "line 1 "),
        ('"length": 4', '"length": 3', "line 1 .*not within the 3 tokens"),
        ('"length": 4', '"length": 4.5', "line 1 .*integers"),
        ("[[0, 4,", "[[4,", "line 1 "),
        ("[2, 4, 1]", "[2, 4, 9]", "line 1 .*the ranks are 0 to 1"),
        ("[2, 4, 1]", "[2, 4]", "line 1 "),
        ("[2, 4, 1]", '[2, 4, "1"]', "line 1 .*integers"),
    ],
)
def test_text_that_is_no_plan_is_quoted(old: str, new: str, complaint: str) -> None:
    text = to_text(plan_of("ring", causal(4), 2))
    assert old in text
    with pytest.raises(PlanError, match=complaint):
        from_text(text.replace(old, new, 1))


def small(blocks: tuple[Block, ...], transfers: tuple[Transfer, ...] = ()) -> Plan:
    return Plan(causal(4), contiguous(4, 2), FORWARD, blocks, transfers)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (small((Block(0, 0, 0, 0), Block(0, 0, 0, 0))), "written twice"),
        (small((Block(0, 2, 0, 0),)), "no block of a plan on 2 ranks"),
        (small((Block(0, 0, 0, 1),)), "holds no pair of the mask"),
        (small((), (Transfer(0, 0, 0, "kv", 0),)), "no transfer of a forward plan"),
        (small((), (Transfer(0, 0, 1, "dkv", 0),)), "no transfer of a forward plan"),
        (small((), (Transfer(0, 0, 1, "out", 0),)), "R3: .* away from its owner"),
        (small((Block(0, 1, 1, 0),)), "rank 1, step 0: R1, R2: it does not hold kv of chunk 0 yet"),
        (small((Block(1, 0, 1, 0),), (Transfer(0, 1, 0, "q", 1),)), "R4: out of chunk 1, .* never goes to its owner"),
        (small((), (Transfer(0, 0, 1, "out", 1),)), "rank 0, step 0: R3: it sends out of chunk 1 that it never wrote"),
        (small((Block(0, 0, 0, 0),)), "R4: out of chunk 1"),
        (small(()), "R4: out of chunk 0 does not hold each pair of the mask exactly once"),
        (replace(small(()), layout=Layout((Span(0, 2), Span(3, 4)), (0, 1))), "no disjoint cover"),
        (replace(small(()), layout=Layout((Span(0, 2), Span(2, 3)), (0, 1))), "no disjoint cover"),
    ],
)
def test_a_wrong_plan_is_refused_by_the_rule_that_it_breaks(plan: Plan, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check(plan)


def test_a_refusal_shows_the_grid_with_the_failing_cell_marked() -> None:
    with pytest.raises(PlanError) as refusal:
        check(small((Block(0, 0, 0, 0), Block(0, 1, 1, 1), Block(1, 1, 1, 0))))
    assert "1.0<!" in refusal.value.picture


def test_a_text_without_one_of_its_phases_is_refused() -> None:
    text = to_text(plan_of("ring", causal(4), 2))
    with pytest.raises(PlanError, match="lacks blocks of phase backward"):
        from_text(text[: text.index('["backward"')])
    with pytest.raises(PlanError, match="lacks blocks of phase forward and backward"):
        from_text("")
