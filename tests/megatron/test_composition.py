"""Distributed attention together with Megatron's other parallelisms and layer kinds equals one rank."""

from __future__ import annotations

from typing import Any

import pytest

from dfa_megatron.config import MegatronConfig
from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.test_parity import EXPERTS, expected
from tests.support.workers import run_ranks

ONE_GROUP = (("num_query_groups", 1),)
ALLGATHER = (*EXPERTS[:-1], ("moe_token_dispatcher_type", "allgather"))

REFERENCES: dict[str, tuple[tuple[str, Any], ...]] = {
    "one group": ONE_GROUP,
    "experts": ALLGATHER,
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of what one rank without distributed attention comes to, by kind of model."""
    folder = tmp_path_factory.mktemp("references")
    cases = [
        (str(folder / f"{name}.pt"), Case(options=None, steps=4, config=config)) for name, config in REFERENCES.items()
    ]
    run_ranks(1, harness.save_references, cases, timeout=120)
    return dict(zip(REFERENCES, (path for path, _ in cases), strict=True))


def check(ranks: int, cases: list[tuple[Topology, Case, str]]) -> None:
    """One start of the workers for all cases: (topology, case, path of the reference)."""
    prepared = [(topology, wanted, expected(topology, wanted), path) for topology, wanted, path in cases]
    run_ranks(ranks, harness.check_topologies, prepared, timeout=170)


def full(layout: str, config: Any = (), steps: int = 3, **more: Any) -> Case:
    return case(layout, "auto", config=config, steps=steps, **more)


def selective(layout: str, *modules: str, more: Any = ()) -> Case:
    """--recompute-granularity selective --recompute-modules ...: Megatron's own, attention runs once without us."""
    config = (*more, ("recompute_granularity", "selective"), ("recompute_modules", list(modules)))
    return Case(MegatronConfig(data_layout=layout), steps=3, config=config)


def offloaded() -> Case:
    """What rematerialization keeps waits in host memory."""
    return Case(MegatronConfig(remat_offload=True), recompute=("uniform", 1), steps=3)


@pytest.mark.support("megatron", "CP 2: distributed optimizer, experts (EP 2), selective recomputation, offload")
def test_two_ranks_with_overlapped_reductions_sharded_optimizers_and_offloading(reference: str) -> None:
    check(
        2,
        [
            (Topology(cp=2), full("contiguous", overlap=True), reference),
            (Topology(cp=2), full("boundary", optimizer="distributed"), reference),
            (Topology(cp=2), full("contiguous", overlap=True, optimizer="distributed"), reference),
            (Topology(cp=2), offloaded(), reference),
        ],
    )


@pytest.mark.support("megatron", "CP 2: distributed optimizer, experts (EP 2), selective recomputation, offload")
def test_two_ranks_with_other_layer_kinds(reference: str, references: dict[str, str]) -> None:
    check(
        2,
        [
            (Topology(cp=2), selective("contiguous", "mlp"), reference),
            (Topology(cp=2), selective("boundary", "moe", more=ALLGATHER), references["experts"]),
            (Topology(tp=2), full("contiguous", ONE_GROUP, steps=2), references["one group"]),
            (Topology(cp=2, ep=2), full("boundary", ALLGATHER), references["experts"]),
        ],
    )


@pytest.mark.support("megatron", "CP 2 x DP 2, EP 2; fewer key/value groups than TP")
def test_four_ranks_with_data_parallelism_and_fewer_groups_than_tensor_ranks(
    reference: str, references: dict[str, str]
) -> None:
    check(
        4,
        [
            (Topology(cp=2, dp=2), full("contiguous", overlap=True), reference),
            (Topology(cp=2, dp=2), full("boundary", overlap=True, optimizer="distributed"), reference),
            (Topology(tp=2, cp=2), full("boundary", ONE_GROUP, steps=2), references["one group"]),
            (Topology(cp=2, dp=2, ep=2), full("contiguous", ALLGATHER, steps=2), references["experts"]),
        ],
    )
