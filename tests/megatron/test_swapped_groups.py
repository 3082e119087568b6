"""Groups that a trainer swaps after the build, as Megatron-Bridge does to evaluate at another context-parallel size."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import attends, harness, hybrids
from tests.megatron.attends import positions
from tests.megatron.harness import Case, Topology, case
from tests.megatron.kinds import BY_LIST, LATENT, UNBALANCED, YARN, by_turns
from tests.support import state_kernels
from tests.support.models import noise
from tests.support.workers import run_ranks

SIZES = (((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0, 1, 2, 3),))
"""Ranks that share a sequence in an evaluation; those of the training are neighbours."""
NAMES = {"cp_group": "cp", "tp_cp_group": "tp_cp", "tp_dp_cp_group": "tp_dp_cp", "dp_cp_group": "dp_cp"}
CASES = (
    (1, case("boundary", config=BY_LIST)),
    (2, Case(MegatronConfig(data_layout="boundary", checkpoint="remat", loss_tile=8))),
    (2, case("contiguous", config=YARN, pairs="documents")),
    (2, case("zigzag", config=LATENT, pairs="tree")),
    (1, case("contiguous", "remat", config=(*UNBALANCED, ("num_layers", 2)), pairs="documents")),
)


def collections() -> list[Any]:
    """For each of SIZES the groups of this rank: those of the training with others for context parallelism."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    made = []
    for size in SIZES:
        found = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
        for ranks in size:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                for name in NAMES.values():
                    setattr(found, name, group)
        made.append(found)
    return made


def install(model: Any, groups: Any) -> None:
    """Swap what Megatron-Bridge's `install_pg_collection` swaps; older releases leave the rotary modules out."""
    model.config.context_parallel_size = groups.cp.size()
    for module in model.modules():
        if hasattr(module, "pg_collection"):
            module.pg_collection = groups
        for attribute, name in NAMES.items():
            if hasattr(module, attribute) and not hasattr(module.forward, "cache_clear"):
                setattr(module, attribute, getattr(groups, name))
        if hasattr(module, "cp_size"):
            module.cp_size = groups.cp.size()


@contextlib.contextmanager
def swapped(model: Any, groups: Any) -> Iterator[Any]:
    built = model.pg_collection
    install(model.eval(), groups)
    try:
        with torch.no_grad():
            yield groups.cp
    finally:
        install(model.train(), built)


def losses(model: Any, whole: dict[str, Any], group: Any, options: MegatronConfig) -> tuple[torch.Tensor, Any]:
    """This rank's losses, and where its tokens are in the whole batch."""
    from dfa_megatron.megatron import shard_batch

    at = torch.arange(whole["tokens"].numel()).view_as(whole["tokens"])
    batch = shard_batch({**whole, "at": at}, group, options)
    at = batch.pop("at")
    return model(**batch), at


def evaluate(rank: int, world_size: int, cases: tuple[tuple[int, Case], ...]) -> None:
    for size, wanted in cases:
        assert wanted.options is not None
        options, before = wanted.options, torch.Tensor()
        harness.start(Topology(dp=4))
        whole = harness.micro_batch(0, 0) | attends.entries(wanted.pairs, 0, 0)
        own = harness.make_model(harness.make_config(Topology(), Case(None, config=wanted.config)), None)
        expected = (
            attends.alone(whole, own)
            if wanted.pairs
            else own(whole["tokens"], whole["position_ids"], attends.hidden_above(48), labels=whole["labels"])
        ).flatten()
        topology = Topology(cp=size, dp=4 // size)
        harness.start(topology)
        model = harness.make_model(harness.make_config(topology, wanted), options).train()
        for groups in [None, *collections(), None]:
            if groups is not None:
                with swapped(model, groups) as group:
                    got, at = losses(model, whole, group, options)
                torch.testing.assert_close(got, expected[at].view_as(got), rtol=0, atol=1e-5)
                continue
            model.zero_grad()
            got, at = losses(model, whole, model.cp_group, options)
            torch.testing.assert_close(got, expected[at].view_as(got), rtol=0, atol=1e-5)
            got.sum().backward()
            gradients = torch.cat([x.grad.flatten() for x in model.parameters()])
            assert not len(before) or torch.equal(before, gradients), "training after evaluations is as before"
            before = gradients


@pytest.mark.support("megatron", "evaluation at another context-parallel size: 1, 2, 3, 4")
def test_losses_follow_the_groups_of_each_evaluation_and_training_goes_on_as_before() -> None:
    run_ranks(4, evaluate, by_turns(CASES), timeout=170)


def states(rank: int, world_size: int) -> None:
    """Mamba mixers and gated delta nets, on hidden states."""
    from dfa_megatron.megatron import declare_batch_layout

    state_kernels.install()
    hidden = noise("hidden", (24, 2, harness.HIDDEN))
    for kind, size, layout in (("mamba", 2, "contiguous"), ("delta", 1, "boundary")):
        harness.start(Topology(dp=4))
        with torch.compiler.set_stance("force_eager"):
            expected = hybrids.make(kind, Topology(), None, 0)(hidden, attends.hidden_above(24))
        topology = Topology(cp=size, dp=4 // size)
        harness.start(topology)
        model = hybrids.make(kind, topology, MegatronConfig(data_layout=layout), 0)
        for groups in [*collections(), model.pg_collection]:
            with swapped(model, groups) as group:
                order = "contiguous" if layout == "contiguous" else "zigzag"
                declare_batch_layout(group, order)
                here = positions(order, 24, group.size(), group.rank())
                with torch.compiler.set_stance("force_eager"):
                    got = model(hidden[here], None)
                atol = 1e-5 * expected.abs().max().item()
                torch.testing.assert_close(got, expected[here], rtol=0, atol=atol)


def test_states_and_convolutions_follow_them_too() -> None:
    run_ranks(4, states, timeout=120)


def refused(rank: int, world_size: int) -> None:
    harness.start(Topology(dp=2))
    options = MegatronConfig(data_layout="zigzag")
    config = harness.make_config(Topology(dp=2), case("zigzag"))
    model = harness.make_model(config, options)
    both, whole = dist.new_group([0, 1]), harness.micro_batch(0, 0)
    groups = copy.copy(model.pg_collection)
    groups.cp = both
    with swapped(model, groups):
        config.context_parallel_size = 1
        with pytest.raises(UnsupportedError, match=r"context_parallel_size=1 .* 2 ranks"):
            losses(model, whole, both, options)
        config.context_parallel_size, config.moe_expert_capacity_factor = 2, 1.0
        with pytest.raises(UnsupportedError, match="moe_expert_capacity_factor"):
            losses(model, whole, both, options)
    config.moe_expert_capacity_factor = None
    model.decoder.layers[0].self_attention.core_attention.cp_group = both
    with pytest.raises(UnsupportedError, match=r"replaced in part \(DistributedCoreAttention.cp_group"):
        losses(model, whole, model.cp_group, options)


def test_groups_swapped_in_part_or_beside_the_config_are_refused() -> None:
    run_ranks(2, refused)
