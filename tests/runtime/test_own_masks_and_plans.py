"""A caller's own mask and plan reach the ranks: exact over gloo, and refused where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.attention import _request
from dfa_megatron.errors import PlanError, UnsupportedError
from dfa_megatron.layouts import of_lengths
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.mask import Mask, causal, prefix_lm
from dfa_megatron.plan.proof import check
from dfa_megatron.plan.schedules import with_blocks
from dfa_megatron.runtime.prepare import build, in_use
from dfa_megatron.runtime.request import Inputs, Request
from tests.support.arguments import told
from tests.support.attend import case, compare
from tests.support.workers import over_ranks

LOCAL = 8


def attend_and_compare(rank: int, ranks: int, truth: Mask, **given: Any) -> None:
    """Forward and backward of batch 2 against dense attention over the mask's pairs."""
    compare(case(ranks * LOCAL, mask=truth, seed=ranks), rank, ranks, **given)


@over_ranks(3)
def test_a_mask_a_plan_and_an_edited_plan_run_as_they_are(rank: int, ranks: int) -> None:
    """A mask; a plan as it is made, and one in which another rank computes the last block."""
    mask = prefix_lm(ranks * LOCAL, 5)
    attend_and_compare(rank, ranks, mask, mask=mask, layout="zigzag")
    plan = make_plan(causal(ranks * LOCAL), ranks, schedule="ring")
    attend_and_compare(rank, ranks, causal(ranks * LOCAL), plan=plan)
    *blocks, last = plan.forward.blocks
    edited = with_blocks(plan, [*blocks, last._replace(rank=(last.rank + 1) % ranks, step=last.step + 1)])
    attend_and_compare(rank, ranks, causal(ranks * LOCAL), plan=edited)
    assert in_use()[-1].plan == edited


@over_ranks(2)
def test_every_rank_hears_of_a_plan_that_does_not_fit_on_one(rank: int, ranks: int) -> None:
    """Only the last rank brings a plan for another number of ranks."""
    x, plan = torch.randn(1, LOCAL, 2, 8), make_plan(causal(ranks * LOCAL), 1 if rank else ranks)
    text = told(lambda: dfa_megatron.dist_flash_attn_func(x, x, x, plan=plan))
    if rank:
        assert "it is for 1 ranks, and 2 share the sequence" in text
    else:
        assert text.startswith("DisagreementError: rank 1 of the group refuses this attention: Not supported: the plan")


PLAN = make_plan(causal(LOCAL), 1, schedule="ring")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"causal": True, "mask": causal(LOCAL)}, "causal or window_size and mask"),
        ({"window_size": (3, 0), "plan": PLAN}, "causal or window_size and plan"),
        ({"mask": causal(LOCAL), "plan": PLAN}, "mask and plan"),
        ({}, "attention without causal, mask and plan.*causal=True or causal=False"),
        ({"window_size": (3, 0)}, "attention without causal"),
        ({"mask": causal(LOCAL + 1)}, "its layout has 9 there"),
        ({"plan": make_plan(causal(LOCAL + 1), 1)}, "its layout has 9 there"),
        ({"mask": "causal"}, "mask of type str"),
        ({"plan": PLAN.forward}, "plan of type Plan"),
        (
            {"plan": PLAN, "config": dfa_megatron.DistAttentionConfig(schedule="greedy")},
            "schedule='greedy' with a plan",
        ),
        ({"plan": replace(PLAN, backward=make_plan(prefix_lm(LOCAL, 3), 1).backward)}, "its phases are not"),
    ],
)
def test_a_mask_or_a_plan_that_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    x = torch.randn(1, LOCAL, 2, 8)
    with pytest.raises(UnsupportedError, match=message):
        dfa_megatron.dist_flash_attn_func(x, x, x, **given)


def test_a_plan_for_tokens_that_lie_otherwise_is_refused() -> None:
    plan = make_plan(causal(2 * LOCAL), 2, layout="zigzag")
    x = torch.randn(1, LOCAL, 2, 8)
    build(Request(softmax_scale=1.0, plan=plan, layout="zigzag"), 2, 0, Inputs(x, x, x))
    with pytest.raises(UnsupportedError, match="places tokens by layout 'zigzag'"):
        build(Request(softmax_scale=1.0, plan=plan), 2, 0, Inputs(x, x, x))


@pytest.mark.parametrize("blind", ["check_plan", "check_programs"])
def test_a_plan_is_proved_for_all_ranks_and_each_program_on_its_own(
    blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either proof alone finds what lowering does not see: the last rank's block is missing, or comes twice."""
    real = check.check_programs
    rank_alone = {"check_programs": lambda landings, programs: len(programs) == 1 or real(landings, programs)}
    monkeypatch.setattr(check, blind, rank_alone.get(blind, lambda *_, **__: None))
    x, ranks = torch.randn(1, LOCAL, 2, 8), 3
    plan = make_plan(causal(ranks * LOCAL), ranks, schedule="ring")
    *blocks, last = plan.forward.blocks
    for changed in (blocks, [*blocks, last, last._replace(step=last.step + 1)]):
        with pytest.raises(PlanError, match=r"R3|each pair of the mask|never written|twice"):
            build(Request(softmax_scale=1.0, plan=with_blocks(plan, changed)), ranks, 0, Inputs(x, x, x))


@over_ranks(3)
def test_masks_that_share_a_name_are_told_apart(rank: int, ranks: int) -> None:
    """Masks of one name and length: each is its own plan; then the last rank brings another than the others."""
    length = ranks * LOCAL
    found = [replace(mask, name="mine") for mask in (prefix_lm(length, 3), causal(length), prefix_lm(length, 9))]
    for mask in found:
        attend_and_compare(rank, ranks, mask, mask=mask)
    x = torch.randn(1, LOCAL, 2, 8)
    text = told(lambda: dfa_megatron.dist_flash_attn_func(x, x, x, mask=found[rank == ranks - 1]))
    assert text.startswith("DisagreementError"), text
    assert text.count("digest") == 2


def test_masks_layouts_and_plans_run_beside_the_compiled_graph() -> None:
    mask = prefix_lm(LOCAL, 3)
    plan = make_plan(mask, 1)
    x = torch.randn(1, LOCAL, 2, 8, requires_grad=True)
    for given in ({"mask": mask}, {"plan": plan}, {"layout": of_lengths([LOCAL]), "causal": True}, {"mask": [mask]}):
        run = torch.compile(lambda q, g=given: dfa_megatron.dist_flash_attn_func(q, q, q, **g), backend="aot_eager")
        want = dfa_megatron.dist_flash_attn_func(x, x, x, **given)  # type: ignore[arg-type]
        assert isinstance(want, torch.Tensor)
        assert torch.equal(run(x), want)


def test_a_plan_is_found_again_without_a_look_at_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, other = (make_plan(causal(64), 8, schedule=name) for name in ("balanced_shared", "ring"))
    found = {plan: 1, other: 2}
    for record in (type(plan.forward.blocks[0]), type(plan.forward.transfers[0])):
        monkeypatch.setattr(record, "__hash__", lambda self: pytest.fail("the blocks were hashed"))
    assert found[plan] == 1
    assert found[other] == 2
    assert _request("", softmax_scale=1.0, plan=plan) is _request("", softmax_scale=1.0, plan=plan)
