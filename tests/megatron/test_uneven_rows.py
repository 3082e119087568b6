"""Packs whose row the ranks do not divide: losses and gradients are those of one rank, or a refusal says why."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import attends, harness, hybrids
from tests.megatron.harness import Case, Topology, case
from tests.megatron.kinds import BY_LIST, LATENT, UNBALANCED
from tests.support.workers import run_ranks

CASES = (
    (50, case("boundary", "remat", config=BY_LIST, pairs="documents")),
    (49, case("contiguous", config=LATENT, pairs="tree")),
    (46, case("zigzag", config=(("num_layers", 2),), pairs="documents")),
    (7, case("boundary", config=(*UNBALANCED, ("num_layers", 2)), pairs="documents")),
)
"""Tokens, of which three ranks hold parts that differ in zigzag order, and how they train."""
SHARDED = (47, case("contiguous", "remat", config=(*hybrids.DELTA, ("num_layers", 2)), pairs="documents"))


def row(length: int, pairs: str) -> dict[str, Any]:
    text = harness.text()[: length + 1]
    cuts = [0, 1, length // 3, length // 3, length - 2, length, length]  # an empty document, and a repeated end
    attending = {"cu_seqlens": torch.tensor([cuts], dtype=torch.int32)}
    if pairs == "tree":
        attending = {"prompt_tree": attends.forest(random.Random(length), length)}
    batch = {"tokens": text[None, :-1], "labels": text[None, 1:], "loss_mask": harness.loss_mask(0, length, 1)}
    return {**batch, "position_ids": torch.arange(length)[None], **attending}


def train(rank: int, world_size: int, cases: tuple[tuple[int, Case], ...]) -> None:
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    for length, wanted in cases:
        assert wanted.options is not None
        whole, topology = row(length, wanted.pairs), Topology(cp=world_size)
        harness.start(Topology(dp=world_size))
        own = harness.make_model(harness.make_config(Topology(), Case(None, config=wanted.config)), None)
        expected = attends.alone(whole, own)
        (expected * whole["loss_mask"]).sum().backward()
        harness.start(topology)
        group = parallel_state.get_context_parallel_group()
        model = harness.make_model(harness.make_config(topology, wanted), wanted.options).train()
        batch = shard_batch({**whole, "at": torch.arange(length)[None]}, group, wanted.options)
        at = batch.pop("at")[0]
        out = model(**batch)
        torch.testing.assert_close(out, expected[:, at], rtol=0, atol=1e-5)
        (out * batch["loss_mask"]).sum().backward()
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad)
            want = own.get_parameter(name).grad
            assert (parameter.grad - want).abs().max() <= 2e-5 * want.abs().max(), (length, name)  # of a few tokens


@pytest.mark.support("megatron", "packed rows that the ranks do not divide")
def test_ranks_hold_parts_of_other_lengths() -> None:
    run_ranks(3, train, CASES, timeout=120)


def test_states_pass_over_parts_of_other_lengths() -> None:
    run_ranks(3, hybrids.in_a_gpt, train, (SHARDED,), timeout=120)


def refused(rank: int, world_size: int) -> None:
    from dfa_megatron.megatron.check_config import check_uneven

    for changes, words in (
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "sequence_parallel"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, "pipeline"),
        ({"num_moe_experts": 4, "expert_model_parallel_size": 2}, "expert parallelism"),
        ({}, "4 of them on rank 0"),
    ):
        config = harness.make_config(Topology(), case())
        vars(config).update(changes)
        with pytest.raises(UnsupportedError, match=words):
            check_uneven(config, [5, 4], 5 if changes else 4, 0)
    harness.start(Topology(cp=2))
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    options, whole = MegatronConfig(), row(7, "documents")
    config = harness.make_config(Topology(cp=2), case(), num_layers=2)
    model = harness.make_model(config, options)
    config.num_moe_experts, config.expert_model_parallel_size = 4, 2
    batch = shard_batch(whole, parallel_state.get_context_parallel_group(), options)
    with pytest.raises(UnsupportedError, match="expert parallelism"):
        model(**batch)


def test_parts_of_megatron_that_take_equal_parts_are_refused() -> None:
    run_ranks(2, refused)
