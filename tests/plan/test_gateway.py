"""Routes over nodes: nothing crosses to a node twice that need not. `test_exact` has their exactness."""

from __future__ import annotations

from collections import Counter

import pytest

from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.cost.hardware import H200_NIC_400G
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.lowering.lower import lower_all
from tests.support.plan_cases import WAYS, plan_of

ROUTED = ("balanced", "balanced_shared", "zigzag", "load_balanced", "greedy")


def crossings(plan: Plan, node: int) -> Counter[tuple[str, int, int]]:
    """How often each chunk of each name crosses to, or comes back from, each node."""
    found: Counter[tuple[str, int, int]] = Counter()
    for t in plan.transfers:
        if t.src // node != t.dst // node:
            away = t.src if t.what in plan.phase.write_names else t.dst
            found[t.what, t.chunk, away // node] += 1
    return found


@pytest.mark.parametrize("name", ["balanced", "zigzag"])
@pytest.mark.parametrize(("ranks", "node"), [(8, 4), (16, 8), (32, 8)])
def test_what_crosses_to_a_node_crosses_once(name: str, ranks: int, node: int) -> None:
    plain, routed = plan_of(name, causal(ranks * 8), ranks), plan_of(name, causal(ranks * 8), ranks, node)
    for before, after in ((plain.forward, routed.forward), (plain.backward, routed.backward)):
        assert max(crossings(before, node).values()) > node // 2
        assert set(crossings(after, node)) == set(crossings(before, node))
        once = crossings(after, node)
        assert sum(once.values()) <= 1.15 * len(once), "a few are needed by two ranks in one step"
        assert len(after.transfers) == len(before.transfers), "as many hops in all, most of them inside nodes"


def test_a_gateway_of_one_node_is_the_direct_route() -> None:
    for name in ROUTED:
        routed, plain = plan_of(name, causal(64), 8, 8), plan_of(name, causal(64), 8)
        assert (routed.forward, routed.backward) == (plain.forward, plain.backward)


def test_handing_on_takes_few_more_slots() -> None:
    for name, more in (("balanced", 4), ("zigzag", 10)):
        plain, routed = (plan_of(name, causal(32 * 8), 32, node).backward for node in (None, 8))
        slots = [max(len(program.slots) for program in lower_all(plan)) for plan in (plain, routed)]
        assert slots[1] <= slots[0] + more


def test_a_named_schedule_has_gateways_but_for_the_ring_which_crosses_once_already() -> None:
    for name, nodes in (("balanced", 8), ("balanced_shared", 8), ("greedy", 8), ("ring", None)):
        assert make_plan(causal(128), 16, schedule=name, hardware=H200_NIC_400G).ranks_per_node == nodes
    assert set(WAYS) == {*ROUTED, "ring"}
