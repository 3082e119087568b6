"""Softmax with a logit that has no value (--softmax-type learnable, off-by-one) trains like Megatron's own."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.test_parity import expected

LEARNABLE = (("softmax_type", "learnable"),)
OFF_BY_ONE = (("softmax_type", "off-by-one"), ("window_size", (9, 0)), ("window_attn_skip_freq", 2))

learned = functools.partial(case, config=LEARNABLE, steps=2)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of what Megatron's own attention on one rank comes to."""
    folder = tmp_path_factory.mktemp("offsets")
    cases = {
        "learnable": Case(options=None, steps=2, config=LEARNABLE, optimizer="megatron"),
        "off by one": Case(options=None, steps=2, config=OFF_BY_ONE),
        "packed": Case(options=None, steps=2, config=LEARNABLE, packed=True),
    }
    run_ranks(1, harness.save_references, [(str(folder / f"{name}.pt"), wanted) for name, wanted in cases.items()])
    return {name: str(folder / f"{name}.pt") for name in cases}


def check(topology: Topology, cases: list[tuple[Case, str]]) -> None:
    prepared = [(topology, wanted, expected(topology, wanted), path) for wanted, path in cases]
    run_ranks(topology.ranks, harness.check_topologies, prepared, timeout=170)


@pytest.mark.support("megatron", "learned and fixed softmax offsets; every layout, TP 2 x CP 2")
def test_two_ranks_train_like_one_in_every_layout(references: dict[str, str]) -> None:
    learnable = references["learnable"]
    offsets = [name for name in torch.load(learnable, weights_only=True)["gradients"] if "softmax_offset" in name]
    assert len(offsets) == harness.LAYERS, "the comparison is of these gradients too"
    check(
        Topology(cp=2),
        [
            (learned("contiguous"), learnable),
            (learned("boundary", "auto"), learnable),
            (learned("zigzag", "auto"), learnable),
            (case("boundary", "auto", config=OFF_BY_ONE, steps=2), references["off by one"]),
            (learned("contiguous", "auto", packed=True, steps=2), references["packed"]),
        ],
    )


@pytest.mark.support("megatron", "learned and fixed softmax offsets; every layout, TP 2 x CP 2")
def test_with_tensor_parallelism_each_rank_has_the_logits_of_its_heads(references: dict[str, str]) -> None:
    check(Topology(tp=2, cp=2), [(learned("boundary", "auto", optimizer="megatron"), references["learnable"])])


def save(rank: int, world_size: int, topology: Topology, wanted: Case, folder: str) -> None:
    harness.start(topology)
    harness.train(topology, wanted, save=folder)


def resume(rank: int, world_size: int, topology: Topology, wanted: Case, folder: str) -> list[float]:
    harness.start(topology)
    return harness.train(topology, wanted, load=folder, first_step=1).losses


def test_checkpoints_carry_the_logits_to_megatrons_own_attention(tmp_path: Path) -> None:
    megatrons = Case(options=None, steps=3, optimizer="megatron", config=LEARNABLE)
    half = learned("contiguous", optimizer="megatron", steps=1)
    run_ranks(2, save, Topology(tp=2), half, str(tmp_path / "ours"))
    run_ranks(1, save, Topology(), replace(megatrons, steps=1), str(tmp_path / "theirs"))
    (mine,) = run_ranks(1, resume, Topology(), megatrons, str(tmp_path / "ours"))
    (theirs,) = run_ranks(1, resume, Topology(), megatrons, str(tmp_path / "theirs"))
    assert mine == pytest.approx(theirs, abs=1e-4)
