"""torch_dist checkpoints go from distributed attention to Megatron's own and back, and to another number of ranks."""

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
from tests.megatron.kinds import LEARNABLE
from tests.support import state_kernels
from tests.support.workers import run_ranks

ALONE, SHARED = Topology(dp=2), Topology(cp=2)
"""Megatron's own layers with whole sequences, and ours with shared ones."""
HYBRID = (*DELTA, ("num_layers", 2), ("mtp_num_layers", 1), ("hetereogenous_dist_checkpoint", True))


def ours(layout: str, config: Any, steps: int = 3) -> Case:
    return case(layout, "auto", steps=steps, optimizer="megatron", config=config)


def resume(rank: int, ranks: int, folder: str, config: Any, shared: Topology) -> list[float]:
    """Stop after a step and go on with the other's layers; the last checkpoint is ours."""
    megatrons = Case(None, steps=3, optimizer="megatron", config=config)
    harness.start(ALONE)
    losses = harness.train(ALONE, megatrons).losses
    ways = [(ALONE, megatrons, shared, ours("boundary", config))] if shared.tp == 1 else []
    for source, first, target, then in (*ways, (shared, ours("contiguous", config), ALONE, megatrons)):
        harness.start(source)
        place = f"{folder}/{len(first.config)}-{first.options is None}"
        harness.train(source, replace(first, steps=1), save=place)
        harness.start(target)
        resumed: Any = harness.train(target, then, load=place, first_step=1).losses
        assert resumed == pytest.approx(losses[1:], abs=1e-4)
    return losses


def on_other_ranks(rank: int, ranks: int, folder: str) -> list[float]:
    harness.start(Topology(cp=ranks))
    return harness.train(Topology(cp=ranks), ours("contiguous", ()), load=f"{folder}/0-False", first_step=1).losses


@pytest.mark.support("megatron", "checkpoints to and from Megatron's own attention")
def test_training_goes_on_with_megatrons_attention_and_back_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    losses = run_ranks(2, resume, str(tmp_path), (), SHARED)[0]
    assert run_ranks(3, on_other_ranks, str(tmp_path))[0] == pytest.approx(losses[1:], abs=1e-4)
    run_ranks(2, resume, str(tmp_path), LEARNABLE, Topology(tp=2))  # each rank has the logits of its heads


@pytest.mark.support("megatron", "checkpoints of hybrids and prediction layers, CP 2 to CP 1 and back")
def test_gated_delta_nets_with_prediction_layers_train_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, in_a_gpt, resume, str(tmp_path), HYBRID, SHARED)


def exchange_states(rank: int, ranks: int, folder: str) -> None:
    state_kernels.install()
    options = MegatronConfig(data_layout="contiguous")
    for source, theirs, target, mine in ((SHARED, options, ALONE, None), (ALONE, None, SHARED, options)):
        harness.start(source)
        saved = make("mamba", source, theirs, 0)
        checkpoints.save(f"{folder}/{theirs is None}", saved)
        harness.start(target)
        loaded, plain = (make("mamba", target, mine, 0) for _ in range(2))
        for parameter in (*loaded.parameters(), *plain.parameters()):
            parameter.data.zero_()
        checkpoints.load(f"{folder}/{theirs is None}", loaded)
        plain.load_state_dict(saved.state_dict())
        wanted = dict(saved.named_parameters())
        for model in (loaded, plain):
            found = dict(model.named_parameters())
            assert found.keys() == wanted.keys()
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.support("megatron", "checkpoints of hybrids and prediction layers, CP 2 to CP 1 and back")
def test_states_of_a_hybrid_stack_go_to_megatrons_own_and_back_to_the_bit(tmp_path: Path) -> None:
    run_ranks(2, exchange_states, str(tmp_path))
