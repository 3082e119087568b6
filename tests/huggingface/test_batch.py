"""A batch is cut so that no label is lost between ranks, and the loss bears ranks without a label."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import run_ranks


def no_label_at_all(rank: int, world_size: int) -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    batch = text(1, 12, seed=3, unlabelled=12)
    for loss in (model(**batch).loss, dfa_hf.causal_lm_loss(model(**batch).logits, batch["labels"])):
        assert loss.item() == 0.0
        model.zero_grad()
        loss.backward()
        assert all(not gradient.any() for gradient in gradients(model).values())


def groups_of_two(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[rank // 2]
    whole = text(1, 12, seed=rank // 2, unlabelled=2 + rank // 2)
    batch = whole
    logits = torch.zeros(1, 6, 61)
    loss = dfa_hf.causal_lm_loss(logits, batch["labels"], group=own)
    assert loss.item() == pytest.approx(torch.tensor(61.0).log().item(), rel=1e-6)


def checkpointed(rank: int, world_size: int) -> None:
    batch = text(1, 12, seed=3)
    seen = {}
    for checkpoint in ("none", "full", "remat"):
        model = dfa_hf.distribute_attention(build("Qwen2"), config=TrainingConfig(checkpoint=checkpoint))
        COUNTERS.reset()
        model(**batch).loss.backward()
        seen[checkpoint] = (gradients(model), COUNTERS.snapshot())
    want, plain = seen["none"]
    assert plain["attention_forwards"] == LAYERS
    assert seen["full"][1]["attention_forwards"] == 2 * LAYERS
    for count in ("attention_forwards", "kernel_forwards", "forward_messages", "forward_bytes"):
        assert seen["remat"][1][count] == plain[count]
    assert seen["remat"][1]["replays"] == LAYERS
    for name, gradient in want.items():
        assert torch.equal(seen["full"][0][name], gradient)
        assert torch.equal(seen["remat"][0][name], gradient)


@pytest.mark.support("models", "rematerialization")
def test_rematerialization_runs_every_attention_once_with_the_same_bits() -> None:
    run_ranks(2, checkpointed)


def each(rank: int, world_size: int) -> None:
    no_label_at_all(rank, world_size)
    groups_of_two(rank, world_size)


def test_a_batch_without_a_label_has_gradient_zero_and_labels_are_counted_in_the_group_of_the_sequence_only() -> None:
    run_ranks(4, each)


def test_a_copy_of_a_model_is_distributed_as_well() -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    batch = text(1, 8, seed=1)
    other = copy.deepcopy(model)
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    dfa_hf.distribute_attention(other, config=TrainingConfig(checkpoint="remat"))  # once more: hooks are not doubled
    assert len(other.model._forward_pre_hooks) == 1
    assert torch.equal(other(**batch).loss, model(**batch).loss)
