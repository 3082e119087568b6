"""`auto` takes the cheapest schedule that serves the request, the same on every rank, or says why there is none."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from dfa_megatron import names
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import best, candidates, make_plan
from dfa_megatron.plan.cost.hardware import (
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    IDEAL_LINK,
    Hardware,
    Link,
    computing_with,
)
from dfa_megatron.plan.language.mask import Mask, causal, documents, full, prefix_lm, sliding_window
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.language.tree import prompt_tree
from dfa_megatron.plan.language.work import TIE
from dfa_megatron.plan.schedules import OWNER_COMPUTES
from tests.support.plan_cases import some_lengths, some_parents

FEW = Sizes(kv_heads=8)


@pytest.mark.parametrize(
    ("mask", "ranks", "about", "wanted"),
    [
        (causal(8 * 4096), 8, {"hardware": IDEAL_LINK}, ("balanced_shared",)),
        (causal(8 * 4096), 8, {"sizes": Sizes(kv_heads=1), "hardware": H200_SLOW_LINK}, ("zigzag",)),
        (full(4 * 8192), 4, {"layout": "contiguous"}, ("ring",)),
        (sliding_window(48, 5, 5), 4, {"layout": "contiguous"}, ("ring", "greedy")),
        (documents([20, 28], causal=False), 4, {"layout": "contiguous"}, ("ring", "greedy")),
        (documents([4 * 8192, *[512] * 64]), 8, {"layout": "contiguous", "sizes": FEW}, ("greedy",)),
        (documents([2 * 8192, 3 * 8192, *[256] * 96]), 8, {"sizes": replace(FEW, heads=64)}, ("load_balanced",)),
    ],
)
def test_auto_takes_the_schedule_or_layout_that_fits(
    mask: Mask, ranks: int, about: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    plan = make_plan(mask, ranks, **about)
    assert (plan.schedule if plan.layout == "contiguous" else plan.layout) in wanted


def test_auto_does_not_ask_for_help_where_work_is_even() -> None:
    looked_at = {c.name: c for c in candidates(causal(8 * 4096), 8)}
    assert looked_at["greedy"].refusal == "the work of balanced_shared is even"


def test_nodes_bring_gateways_that_a_slow_network_needs() -> None:
    hardware = replace(H200_NIC_400G, network=Link(10e9, 3e-5))
    mask, shape = causal(32 * 4096), Sizes()
    chosen = make_plan(mask, 32, sizes=shape, hardware=hardware)
    assert chosen.ranks_per_node == 8
    assert make_plan(mask, 32, schedule="balanced", hardware=hardware).ranks_per_node == 8
    assert make_plan(mask, 32, schedule="ring", hardware=hardware).ranks_per_node is None
    assert make_plan(causal(8 * 4096), 8, hardware=hardware).ranks_per_node is None, "one node"


@pytest.mark.parametrize("layout", OWNER_COMPUTES)
def test_a_layout_that_shares_out_the_work_has_one_schedule(layout: str) -> None:
    plan = make_plan(causal(32), 4, layout=layout)
    assert (plan.schedule, plan.layout) == (names.OWNER_COMPUTES, layout)
    assert all(plan.forward.layout.owner[block.q_chunk] == block.rank for block in plan.forward.blocks)
    with pytest.raises(UnsupportedError, match=r"every rank computes its own rows.* schedule 'auto'"):
        make_plan(causal(32), 4, schedule="ring", layout=layout)
    with pytest.raises(UnsupportedError, match="no such schedule"):
        make_plan(causal(32), 4, schedule=names.OWNER_COMPUTES)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"schedule": "circle"}, "one of auto, ring, balanced, balanced_shared, greedy"),
        ({"layout": "spiral"}, "one of auto, contiguous, zigzag, load_balanced"),
        ({"schedule": "balanced", "layout": "zigzag"}, "schedule 'balanced' on layout 'zigzag'"),
        ({"schedule": "ring", "ranks": 0}, "at least one"),
    ],
)
def test_a_request_that_nothing_serves_is_refused_with_every_reason(
    arguments: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        make_plan(causal(32), **{"ranks": 4, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", [H200_NVLINK, H200_SLOW_LINK, replace(H200_NIC_400G, ranks_per_node=2)])
def test_no_schedule_beats_what_auto_takes_and_a_tie_goes_to_the_first(hardware: Hardware) -> None:
    hardware = computing_with("flash4", hardware)
    heads = itertools.cycle(((32, 32), (32, 8), (32, 1), (33, 33), (28, 4), (2, 2), (16, 4)))
    for seed, ranks in enumerate((1, 2, 4, 6, 8, 8)):
        generator = random.Random(seed)
        lengths = some_lengths(tokens := ranks * generator.choice([1024, 8192]), generator)
        tree = prompt_tree(lengths, some_parents(len(lengths), generator))
        others = (documents(lengths), tree, prefix_lm(tokens, tokens // 3), sliding_window(tokens, 2000, 900))
        for mask in (*others, *(causal(1024 * k) for k in (8, 32, 128, 512))):
            many, few = next(heads)
            sizes = Sizes(heads=many, kv_heads=few, backward_needs="delta")
            about: dict[str, Any] = {"layout": "contiguous", "sizes": sizes, "hardware": hardware}
            every = [one for one in candidates(mask, ranks, **about) if one.plan]
            tied = [one for one in every if one.seconds <= (1 + TIE) * min(one.seconds for one in every)]
            assert tied[0].plan == make_plan(mask, ranks, **about), (mask.name, many, few)
            assert best(candidates(mask, ranks, **about)) == tied[0]
