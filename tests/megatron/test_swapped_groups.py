"""Groups that a trainer swaps after the build, as Megatron-Bridge does to evaluate at another context-parallel size."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import BY_LIST, like
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.fuzz.frameworks.one_rank import apart
from tests.support.arguments import assert_refused
from tests.support.workers import by_turns, over_ranks

SIZES = (((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0, 1, 2, 3),))
"""Ranks that share a sequence in an evaluation; those of the training are neighbours."""
NAMES = {"cp_group": "cp", "tp_cp_group": "tp_cp", "tp_dp_cp_group": "tp_dp_cp", "dp_cp_group": "dp_cp"}
ROWS = (
    like("plain", {"dp": 4}, "boundary", config=BY_LIST),
    like("plain", {"cp": 2, "dp": 2}, "boundary", "remat", options={"loss_tile": 8}),
    like("packed yarn", {"cp": 2, "dp": 2}),
    like("tree latent", {"cp": 2, "dp": 2}, "zigzag"),
    like("packed experts", {"dp": 4}, "contiguous", "remat"),
    like("stack", {"cp": 2, "dp": 2}),
    like("packed delta", {"dp": 4}, "boundary"),
)


def collections() -> list[Any]:
    """For each of SIZES the groups of this rank: those of the training with others for context parallelism."""
    made = []
    for size in SIZES:
        found = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
        for ranks in size:
            group = harness.group_of(*ranks)
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


def check(model: Any, row: MegatronDraw, group: Any, expected: torch.Tensor) -> torch.Tensor:
    """Compare this rank's losses of the first micro-batch, and return them."""
    batch = harness.batch_of(row, group)
    got: torch.Tensor = model(**harness.taken(batch, model))
    torch.testing.assert_close(got, expected[batch["at"]], rtol=0, atol=1e-5, check_dtype=False)
    return got


def losses_alone(row: MegatronDraw) -> torch.Tensor:
    """The losses of all tokens, by Megatron's own attention on one rank."""
    alone = row.alone()
    harness.start(alone)
    with harness.with_layers(row), apart() if row.has_documents else contextlib.nullcontext():
        return harness.alone(alone, harness.batch_of(alone, None), harness.model_of(alone)).flatten()


@pytest.mark.support("megatron", "evaluation at another context-parallel size: 1, 2, 3, 4")
@over_ranks(4, timeout=170)
def test_losses_follow_the_groups_of_each_evaluation_and_training_goes_on_as_before(rank: int, ranks: int) -> None:
    with torch.compiler.set_stance("force_eager"):
        # Those of one start of Megatron's groups one after another.
        for row, expected in sorted(
            ((row, losses_alone(row)) for row in by_turns(ROWS)), key=lambda each: each[0].start
        ):
            harness.start(row)
            with harness.with_layers(row):
                evaluate_by_turns(row, expected)


def evaluate_by_turns(row: MegatronDraw, expected: torch.Tensor) -> None:
    """Train, evaluate with each of `collections`, and train again."""
    model, before = harness.model_of(row), torch.Tensor()
    for groups in [None, *collections(), None]:
        if groups is not None:
            with swapped(model, groups) as group:
                check(model, row, group, expected)
            continue
        model.zero_grad()
        check(model, row, model.cp_group, expected).sum().backward()
        gradients = torch.cat([x.grad.flatten() for x in model.parameters()])
        assert not len(before) or torch.equal(before, gradients), "training after evaluations is as before"
        before = gradients


@over_ranks(2)
def test_groups_swapped_in_part_or_beside_the_config_are_refused(rank: int, ranks: int) -> None:
    row = like("plain", {"dp": 2}, "zigzag")
    harness.start(row)
    config = harness.config_of(row)
    model, expected = harness.model_of(row, config), torch.zeros(96)
    both = dist.new_group([0, 1])
    groups = copy.copy(model.pg_collection)
    groups.cp = both
    with swapped(model, groups):
        config.context_parallel_size = 1
        assert_refused(r"context_parallel_size=1 .* 2 ranks", check, model, row, both, expected)
        config.context_parallel_size, config.moe_expert_capacity_factor = 2, 1.0
        assert_refused("moe_expert_capacity_factor", check, model, row, both, expected)
    config.moe_expert_capacity_factor = None
    model.decoder.layers[0].self_attention.core_attention.cp_group = both
    assert_refused(r"replaced in part \(DistributedCoreAttention.cp_group", check, model, row, model.cp_group, expected)
