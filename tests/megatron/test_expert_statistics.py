"""What a router computes over tokens equals one rank: its losses and counts, with padding and uneven loss masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.test_composition import ALLGATHER
from tests.support.workers import run_ranks

EXPERTS = (*ALLGATHER, ("num_layers", 2), ("moe_layer_freq", [0, 1]))
LOSSES = (
    ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss", "global_aux_loss"]),
    ("moe_aux_loss_coeff", [0.5, 0.3, 0.2]), ("moe_z_loss_coeff", 0.1),
)  # fmt: skip
PER_TOKEN = (("calculate_per_token_loss", True),)
BIAS = (
    ("moe_router_score_function", "sigmoid"), ("moe_router_enable_expert_bias", True),
    ("moe_router_bias_update_rate", 0.1),
)  # fmt: skip


@pytest.mark.support("megatron", "losses, z-loss and bias of routers, with padding_mask and uneven loss masks; CP 3")
def test_losses_and_counts_of_experts_are_of_all_tokens(tmp_path: Path) -> None:
    def given(*config: Any, **more: Any) -> dict[str, Any]:
        return {"config": (*EXPERTS, *(field for fields in config for field in fields)), "steps": 2, **more}

    kinds = {
        "mean": given(LOSSES, masked=True),
        "per token": given(LOSSES, PER_TOKEN, masked=True),
        "whole": given(LOSSES, PER_TOKEN),
        "bias": given(BIAS, steps=3),
    }
    paths = {kind: str(tmp_path / f"{kind}.pt") for kind in kinds}
    run_ranks(1, harness.save_references, [(paths[kind], Case(options=None, **more)) for kind, more in kinds.items()])
    three = [
        ("mean", "contiguous", "auto"), ("mean", "boundary", "none"), ("mean", "zigzag", "none"),
        ("per token", "contiguous", "none"), ("per token", "boundary", "auto"),
        ("whole", "contiguous", "none"), ("bias", "contiguous", "none"),
    ]  # fmt: skip
    four = [("mean", "boundary", "auto"), ("per token", "contiguous", "none")]
    for topology, ways in ((Topology(cp=3), three), (Topology(tp=2, cp=2), four), (Topology(tp=2), three[:1])):
        cases: list[Any] = [(topology, case(way[1], way[2], **kinds[way[0]]), {}, paths[way[0]]) for way in ways]
        run_ranks(topology.ranks, harness.check_topologies, cases, timeout=170)
