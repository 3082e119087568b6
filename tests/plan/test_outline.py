"""Plans in outline: their times are those of the simulator, and docs/scale.json is what the code computes today."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dfa_megatron.plan.cost.hardware import H200_NIC_400G, H200_SLOW_LINK, IDEAL_LINK, Hardware
from dfa_megatron.plan.cost.outline import estimate, outline
from dfa_megatron.plan.cost.simulate import simulate
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape
from docs import scale_tables
from tests.support.plan_cases import plan_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("hardware", [H200_NIC_400G, H200_SLOW_LINK, IDEAL_LINK])
@pytest.mark.parametrize("name", ["balanced", "balanced_shared", "zigzag", "ring"])
@pytest.mark.parametrize("ranks", [3, 8, 16])
def test_an_outline_takes_as_long_as_the_programs(name: str, hardware: Hardware, ranks: int) -> None:
    for node in (None, 4):
        if node is not None and name == "ring":
            continue
        attention = plan_of(name, causal(ranks * 4096), ranks, node)
        machine = replace(hardware, ranks_per_node=4) if hardware.network else hardware
        for kv_heads in (32, 4):
            shape = AttentionShape(kv_heads=kv_heads)
            for plan in (attention.forward, attention.backward):
                real, rough = simulate(plan, shape, machine), estimate(outline(plan), shape, machine)
                assert rough.seconds == pytest.approx(real.makespan, rel=0.15)
                assert rough.idle_share == pytest.approx(real.idle_share, abs=0.1)


def test_an_outline_stretches_to_other_lengths() -> None:
    long, short = (plan_of("balanced_shared", causal(8 * tokens), 8).backward for tokens in (8192, 2048))
    stretched = estimate(outline(long), AttentionShape(), H200_NIC_400G, length=8 * 2048)
    own = estimate(outline(short), AttentionShape(), H200_NIC_400G)
    assert stretched.seconds == pytest.approx(own.seconds, rel=0.01)
    assert stretched.link_bytes == pytest.approx(own.link_bytes)


def test_bytes_are_those_of_the_plan_by_link_class() -> None:
    plan, shape = plan_of("zigzag", causal(16 * 512), 16).forward, AttentionShape(kv_heads=8)
    timeline = simulate(plan, shape, H200_NIC_400G)
    split = estimate(outline(plan), shape, H200_NIC_400G)
    whole = estimate(outline(plan), shape, replace(H200_NIC_400G, ranks_per_node=16))
    assert (whole.link_bytes, whole.network_bytes) == (max(timeline.sent), 0)
    assert split.network_bytes > 0
    assert max(split.network_bytes, split.link_bytes) < whole.link_bytes <= split.network_bytes + split.link_bytes


def test_the_points_of_the_page_are_those_of_the_code() -> None:
    points = json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))
    assert {point["ranks"] for point in points} == set(scale_tables.RANKS)
    for ranks in (8, 16):
        for schedule, gateway in scale_tables.LINES:
            kept = [p for p in points if (p["ranks"], p["schedule"], p["gateway"]) == (ranks, schedule, gateway)]
            assert scale_tables.rows(ranks, schedule, gateway) == kept, "run `python -m docs.scale_tables`"
