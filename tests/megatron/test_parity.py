"""Training with distributed attention equals Megatron-Core's own attention on one rank, whatever the topology."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.support.workers import run_ranks

FULL = ("uniform", 1)
"""--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""


def expected(topology: Topology, wanted: Case) -> dict[str, int]:
    """What the first step of a case must count on every rank: each attention runs once per layer and micro-batch."""
    assert wanted.options is not None
    layers = dict(wanted.config).get("num_layers", harness.LAYERS) // topology.pp
    micro_batches = harness.MICRO_BATCHES // topology.dp
    attentions = layers * micro_batches
    full = wanted.recompute is not None
    if wanted.options.checkpoint == "none" or (wanted.options.checkpoint == "auto" and not full):
        return {"attention_forwards": attentions * (2 if full else 1), "replays": 0, "remat_bytes": 0}
    replays = attentions
    if wanted.options.checkpoint == "auto" and wanted.recompute is not None and wanted.recompute[0] == "block":
        chunks = topology.vp or 1
        replays = min(wanted.recompute[1], layers // chunks) * chunks * micro_batches
    rows = harness.SEQUENCE // topology.cp * harness.BATCH * harness.HEADS // topology.tp
    width = dict(wanted.config).get("v_head_dim", harness.HIDDEN // harness.HEADS)
    kept = rows * (width + 1) * 4  # out and lse, float32
    return {"attention_forwards": attentions, "replays": replays, "remat_bytes": replays * kept}


def check(topology: Topology, cases: list[Case], reference: str) -> None:
    run_ranks(
        topology.ranks,
        harness.check_cases,
        topology,
        [(wanted, expected(topology, wanted)) for wanted in cases],
        reference,
        timeout=170,
    )


def both_layouts(steps: int) -> list[Case]:
    """Contiguous with remat for `steps`; the other three for as many as show that steps follow each other."""
    others = (("contiguous", "none"), ("boundary", "none"), ("boundary", "auto"))
    return [
        case("contiguous", "auto", steps=steps),
        *(case(layout, checkpoint, steps=3) for layout, checkpoint in others),
    ]


def of_topology(params: Mapping[str, Any]) -> str:
    """The row of docs/support.md."""
    topology: Topology = params["topology"]
    if topology.tp > 1:
        return "TP 2 x CP 2 with sequence parallelism, the same"
    if topology.pp > 1:
        return "PP 2 x CP 2, the same"
    return "CP 2, 3, 4; layouts `contiguous`, `boundary`; recomputation ours and none"


@pytest.mark.support("megatron", of_topology)
@pytest.mark.parametrize(
    ("topology", "steps"),
    [
        (Topology(cp=2), 4),
        (Topology(cp=3), harness.STEPS),
        (Topology(cp=4), 4),
        (Topology(tp=2, cp=2), 4),
        (Topology(pp=2, cp=2), 4),
    ],
    ids=["cp2", "cp3", "cp4", "tp2-cp2-sequence-parallel", "pp2-cp2"],
)
def test_both_layouts_with_and_without_remat_train_like_one_rank(
    topology: Topology, steps: int, reference: str
) -> None:
    check(topology, both_layouts(steps), reference)


@pytest.mark.support("megatron", "interleaved pipeline, PP 2 x VP 2 x CP 2")
def test_interleaved_pipeline_trains_like_one_rank(reference: str) -> None:
    check(Topology(pp=2, vp=2, cp=2), [case("boundary", "auto", steps=3)], reference)


def test_one_rank_runs_the_same_class(reference: str) -> None:
    check(Topology(), [case("contiguous", "auto", steps=5), case("boundary", steps=2)], reference)


@pytest.mark.support("megatron", "layout `zigzag`, CP 3")
def test_zigzag_layout_trains_like_one_rank_without_any_exchange(reference: str) -> None:
    check(Topology(cp=3), [case("zigzag"), case("zigzag", "auto", steps=3)], reference)


@pytest.mark.support("megatron", "recomputation full, block, uniform; Megatron's own or ours")
def test_what_is_recomputed_follows_the_flags(reference: str) -> None:
    check(
        Topology(cp=2),
        [
            case(checkpoint="none", recompute=FULL, steps=2),  # Megatron's own: every attention runs twice
            case("boundary", checkpoint="none", recompute=FULL, steps=2),
            case(checkpoint="auto", recompute=("block", 3), steps=2),
            case(checkpoint="auto", recompute=("uniform", 2), steps=2),  # taken as 1
            case(checkpoint="remat", recompute=None, steps=2),
            case("boundary", checkpoint="remat", recompute=("block", 1), steps=2),
        ],
        reference,
    )


@pytest.mark.support("megatron", "TP 2 without sequence parallelism")
def test_tensor_parallelism_without_sequence_parallelism_trains_like_one_rank(reference: str) -> None:
    config = (("sequence_parallel", False), ("distribute_saved_activations", True))
    check(Topology(tp=2), [case("contiguous", "auto", steps=3, config=config)], reference)
    check(Topology(tp=2, cp=2), [case("boundary", "auto", steps=2, config=config[:1])], reference)


def test_norms_of_queries_and_keys_under_sequence_parallelism_train_like_one_rank(tmp_path: Path) -> None:
    path, config = str(tmp_path / "norms.pt"), (("qk_layernorm", True),)
    run_ranks(1, harness.save_reference, path, Case(options=None, steps=3, config=config))
    check(Topology(tp=2, cp=2), [case("boundary", "auto", steps=3, config=config)], path)


EXPERTS = (
    ("num_moe_experts", 4),
    ("moe_layer_freq", [0, 1, 0, 1]),
    ("moe_ffn_hidden_size", 64),
    ("moe_token_dispatcher_type", "alltoall"),
)


@pytest.mark.support("megatron", "experts in every other layer")
def test_experts_in_every_other_layer_train_like_one_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "experts.pt")
    run_ranks(1, harness.save_reference, path, Case(options=None, steps=5, config=EXPERTS))
    check(Topology(cp=2), [case("boundary", "auto", steps=5, config=EXPERTS)], path)


@pytest.mark.parametrize("topology", [Topology(cp=2), Topology(tp=2, cp=2)], ids=["cp2", "tp2-cp2-sequence-parallel"])
def test_dropout_elsewhere_is_the_same_with_remat(topology: Topology) -> None:
    run_ranks(topology.ranks, harness.check_same_dropout, topology, timeout=120)
