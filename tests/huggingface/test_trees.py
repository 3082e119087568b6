"""Prompt trees are computed as eager attention computes each rollout, with its prompt repeated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron import trees
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import run_ranks

Rollouts = list[list[int]]


def forest(tokens: int, seed: int) -> Rollouts:
    """Random rollouts that share prefixes, of as many tokens in all when each prefix stands once."""
    rng = random.Random(seed)
    rollouts = [[rng.randrange(61) for _ in range(tokens // 4)]]
    while (left := tokens - sum(pack.tree.length for pack in trees.from_rollouts(rollouts))) > 2:
        begin = rng.choice([*rollouts, []])
        own = begin[: rng.randint(0, len(begin))]
        rollouts.append(own + [rng.randrange(61) for _ in range(min(left - 1, rng.randint(2, 6)))])
    return rollouts


def one_by_one(reference: Any, rollouts: Rollouts) -> torch.Tensor:
    """The mean loss of a model that sees one rollout at a time; a shared token counts once."""
    total, count = torch.zeros(()), 0.0
    for own in rollouts:
        ids = torch.tensor(own)
        shares = [sum(other[:end] == own[:end] for other in rollouts) for end in range(2, len(own) + 1)]
        weights = 1 / torch.tensor(shares)
        losses = torch.nn.functional.cross_entropy(
            reference(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none"
        )
        total, count = total + (losses * weights).sum(), count + float(weights.sum())
    return total / count


def compare(rank: int, ranks: int) -> None:
    rollouts = forest(12 * ranks, seed=ranks)
    want = build("Qwen3")
    loss = one_by_one(want, rollouts)
    (pack,) = trees.from_rollouts(rollouts, multiple_of=12 * ranks)
    assert len(pack.tree.parents) > 6
    loss.backward()
    for checkpoint in ("none", "full", "remat"):
        model = dfa_hf.distribute_attention(build("Qwen3"), config=TrainingConfig(checkpoint=checkpoint))
        COUNTERS.reset()
        got = model(**dfa_hf.shard_batch(pack.for_transformers())).loss
        model(**dfa_hf.shard_batch(text(1, 12 * ranks, seed=1)))  # a forward between, of no tree
        got.backward()
        assert COUNTERS.snapshot()["attention_forwards"] == (3 if checkpoint == "full" else 2) * LAYERS
        assert_loss(got, loss, checkpoint)
        assert_gradients(model, gradients(want), checkpoint)


def test_loss_and_gradients_are_those_of_every_rollout_with_its_prompt_repeated() -> None:
    run_ranks(3, compare)


TREE: dict[str, Any] = text(1, 8, seed=0) | {"prompt_tree": ([4, 2, 2], [-1, 0, 0])}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"position_ids": torch.arange(8)[None]}, "a prompt_tree beside position_ids"),
        ({"prompt_tree": ([4, 2], [-1, 0])}, "they have 6 tokens, and a row has 8"),
        ({"prompt_tree": ([4, 2, 2], [-1, 0])}, "3 segments need as many parents"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        dfa_hf.shard_batch(TREE | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("Mistral", {"sliding_window": 3}, "MistralAttention with a window"),
        ("Llama4Text", {"attention_chunk_size": 4}, "Llama4TextAttention with chunks"),
        ("Roberta", {"is_decoder": True}, "a table behind its padding"),
    ],
)
def test_a_layer_that_counts_places_is_refused(kind: str, changes: dict[str, Any], complaint: str) -> None:
    model = dfa_hf.distribute_attention(build(kind, **changes))
    with pytest.raises(UnsupportedError, match=complaint):
        model(**dfa_hf.shard_batch(TREE))


def test_a_model_with_its_own_attention_and_wrong_positions_are_refused() -> None:
    model, local = dfa_hf.distribute_attention(build("Llama")), dfa_hf.shard_batch(TREE)
    with pytest.raises(UnsupportedError, match="position_ids from 0 to 7"):
        model(**local | {"position_ids": torch.arange(8)[None]})
    with dfa_hf.local_attention(model), pytest.raises(UnsupportedError, match="a model with its own attention"):
        model(**local)
