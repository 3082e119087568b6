"""Checkpoints of Mamba stacks, gated delta nets and prediction layers go from two ranks in order to one, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron.config import MegatronConfig
from tests.megatron import checkpoints, harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.hybrids import DELTA, in_a_gpt, make
from tests.support import state_kernels
from tests.support.workers import run_ranks

CONTIGUOUS = MegatronConfig(data_layout="contiguous")
WAYS = [
    (Topology(cp=2), CONTIGUOUS, Topology(dp=2), None),
    (Topology(dp=2), None, Topology(cp=2), CONTIGUOUS),
]
"""From two ranks in order to Megatron's own layers with the whole sequence, and back."""


def exchange_states(rank: int, ranks: int, folder: str) -> None:
    state_kernels.install()
    for way, (source, theirs, target, ours) in enumerate(WAYS):
        harness.start(source)
        saved = make("mamba", source, theirs, 0)
        checkpoints.save(f"{folder}/{way}", saved)
        harness.start(target)
        loaded, plain = (make("mamba", target, ours, 0) for _ in range(2))
        for parameter in (*loaded.parameters(), *plain.parameters()):
            parameter.data.zero_()
        checkpoints.load(f"{folder}/{way}", loaded)
        plain.load_state_dict(saved.state_dict())
        wanted = dict(saved.named_parameters())
        for model in (loaded, plain):
            found = dict(model.named_parameters())
            assert found.keys() == wanted.keys()
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.support("megatron", "checkpoints of hybrids and prediction layers, CP 2 to CP 1 and back")
def test_states_of_a_hybrid_stack_go_to_megatrons_own_and_back_to_the_bit(tmp_path: Path) -> None:
    run_ranks(2, exchange_states, str(tmp_path))


MODEL = (*DELTA, ("num_layers", 2), ("mtp_num_layers", 1), ("hetereogenous_dist_checkpoint", True))
MEGATRONS = Case(None, steps=3, optimizer="megatron", config=MODEL)


def resume(rank: int, ranks: int, folder: str) -> None:
    harness.start(Topology(dp=2))
    losses = harness.train(Topology(dp=2), MEGATRONS).losses
    spread = case("contiguous", "auto", steps=3, optimizer="megatron", config=MODEL)
    for way, (source, theirs, target, ours) in enumerate(WAYS):
        first, then = (MEGATRONS if options is None else spread for options in (theirs, ours))
        harness.start(source)
        harness.train(source, replace(first, steps=1), save=f"{folder}/{way}")
        harness.start(target)
        resumed: Any = harness.train(target, then, load=f"{folder}/{way}", first_step=1).losses
        assert resumed == pytest.approx(losses[1:], abs=1e-5)


@pytest.mark.support("megatron", "checkpoints of hybrids and prediction layers, CP 2 to CP 1 and back")
def test_gated_delta_nets_with_prediction_layers_train_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, in_a_gpt, resume, str(tmp_path))
