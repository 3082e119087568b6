"""Softmax with a logit that has no value (--softmax-type learnable, off-by-one) trains like Megatron's own."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.test_parity import expected
from tests.support.workers import run_ranks

LEARNABLE = (("num_layers", 2), ("softmax_type", "learnable"))
OFF_BY_ONE = (("num_layers", 2), ("softmax_type", "off-by-one"), ("window_size", (9, 0)), ("window_attn_skip_freq", 2))

learned = functools.partial(case, config=LEARNABLE, steps=1)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of what Megatron's own attention on one rank comes to."""
    folder = tmp_path_factory.mktemp("offsets")
    cases = {
        "learnable": Case(options=None, steps=1, config=LEARNABLE, optimizer="megatron"),
        "off by one": Case(options=None, steps=1, config=OFF_BY_ONE),
        "packed": Case(options=None, steps=1, config=LEARNABLE, packed=True),
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
    assert len(offsets) == dict(LEARNABLE)["num_layers"], "the comparison is of these gradients too"
    check(
        Topology(cp=2),
        [
            (learned("contiguous"), learnable),
            (learned("boundary", "auto"), learnable),
            (case("zigzag", "auto", config=OFF_BY_ONE, steps=1), references["off by one"]),
            (learned("contiguous", "auto", packed=True), references["packed"]),
        ],
    )


@pytest.mark.support("megatron", "learned and fixed softmax offsets; every layout, TP 2 x CP 2")
def test_with_tensor_parallelism_each_rank_has_the_logits_of_its_heads(references: dict[str, str]) -> None:
    check(Topology(tp=2, cp=2), [(learned("boundary", "auto", optimizer="megatron"), references["learnable"])])


def save(rank: int, world_size: int, topology: Topology, wanted: Case, folder: str) -> None:
    harness.start(topology)
    harness.train(topology, wanted, save=folder)


def resume_both(rank: int, world_size: int, wanted: Case, ours: str, theirs: str) -> list[list[float]]:
    save(rank, world_size, Topology(), replace(wanted, steps=1), theirs)
    return [harness.train(Topology(), wanted, load=folder, first_step=1).losses for folder in (ours, theirs)]


def test_checkpoints_carry_the_logits_to_megatrons_own_attention(tmp_path: Path) -> None:
    megatrons = Case(options=None, steps=3, optimizer="megatron", config=LEARNABLE)
    half = learned("contiguous", optimizer="megatron")
    run_ranks(2, save, Topology(tp=2), half, str(tmp_path / "ours"))
    ((mine, theirs),) = run_ranks(1, resume_both, megatrons, str(tmp_path / "ours"), str(tmp_path / "theirs"))
    assert mine == pytest.approx(theirs, abs=1e-4)
