"""Prompt trees are computed as eager attention computes each rollout, with its prompt repeated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron import masks, trees
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.counters import COUNTERS
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.huggingface.test_parity import MODELS, NEWER
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import run_ranks

Rollouts = list[list[int]]


def forest(tokens: int, seed: int) -> Rollouts:
    """Random rollouts that share prefixes, of as many tokens in all, or one or two fewer, when each stands once."""
    rng = random.Random(seed)
    rollouts = [[rng.randrange(61) for _ in range(tokens // 4)]]
    while (left := tokens - sum(pack.tree.length for pack in trees.from_rollouts(rollouts))) > 2:
        begin = rng.choice([*rollouts, []])
        own = begin[: rng.randint(0, len(begin))]
        rollouts.append(own + [rng.randrange(61) for _ in range(min(left - 1, rng.randint(2, 6)))])
    return rollouts


def packed(rollouts: Rollouts, tokens: int) -> dict[str, Any]:
    """A batch of them, padded to as many tokens."""
    (pack,) = trees.from_rollouts(rollouts, multiple_of=tokens)
    return pack.for_transformers()


def one_by_one(reference: Any, rollouts: Rollouts, more: Any = None) -> torch.Tensor:
    """The mean loss of a model that sees one rollout at a time; a shared token counts once.

    `more` returns further arguments for the tokens of a rollout.
    """
    total, count = torch.zeros(()), 0.0
    for own in rollouts:
        ids = torch.tensor(own)
        shares = [sum(other[:end] == own[:end] for other in rollouts) for end in range(2, len(own) + 1)]
        logits = reference(input_ids=ids[None], **(more(ids[None]) if more else {})).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, count = total + (losses / torch.tensor(shares)).sum(), count + sum(1 / share for share in shares)
    return total / count


def compare(rank: int, ranks: int) -> None:
    rollouts = forest(12 * ranks - 1, seed=ranks)
    want = build("Qwen3")
    loss = one_by_one(want, rollouts)
    loss.backward()
    for checkpoint in ("none", "full", "remat"):
        model = dfa_hf.distribute_attention(build("Qwen3"), config=TrainingConfig(checkpoint=checkpoint))
        COUNTERS.reset()
        got = model(**packed(rollouts, 12 * ranks - 1)).loss
        model(**text(1, 12 * ranks, seed=1))  # a forward between, of no tree
        got.backward()
        assert COUNTERS.snapshot()["attention_forwards"] == (3 if checkpoint == "full" else 2) * LAYERS
        assert_loss(got, loss, checkpoint)
        assert_gradients(model, gradients(want), checkpoint)
    for seed, name in enumerate(NEAR, ranks):
        kind, changes = (MODELS | NEWER)[name]
        changes = {"experts_implementation": "eager", **changes}
        rollouts = forest(12 * ranks - 1, seed)
        want = build(kind, **changes).double()
        loss = one_by_one(want, rollouts)
        loss.backward()
        model = dfa_hf.distribute_attention(build(kind, **changes).double())
        batch = packed(rollouts, 12 * ranks - 1)
        got = model(**(batch | {"prompt_tree": Tree(*batch["prompt_tree"])})).loss
        got.backward()
        assert_loss(got, loss, name)
        assert_gradients(model, gradients(want), name, 3e-6)  # their norms and losses stay in float32


NEAR = (
    "mistral-window",
    "gemma2-capped-scores",
    "gpt-oss-sinks-window-in-one-layer",
    "gemma4-shared-keys-window-in-half-of-the-layers",
    "llama4-chunks-and-temperature",
)
"""Models that count places: distances along the path, and chunks of it."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradients_are_those_of_every_rollout_with_its_prompt_repeated(ranks: int) -> None:
    run_ranks(ranks, compare, timeout=120)


TREE: dict[str, Any] = text(1, 8, seed=0) | {"prompt_tree": ([4, 2, 2], [-1, 0, 0])}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"position_ids": torch.arange(8)[None]}, "position_ids that are not those of documents, or of a tree"),
        ({"prompt_tree": None, "mask": "causal"}, "a mask that does not fit: it is of type str"),
        ({"prompt_tree": None, "mask": Tree((8,), (-1,))}, "a mask that does not fit: it is of type Tree"),
        ({"prompt_tree": [4, 4]}, "a prompt_tree that does not fit: 'int' object is not iterable"),
        ({"prompt_tree": ([4, 2], [-1, 0])}, "it has 6 tokens, and a row has 8"),
        ({"mask": masks.causal(8)}, "a prompt_tree beside mask"),
        ({"prompt_tree": ([4, 2, 2], [-1, 0])}, "3 segments need as many parents"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        dfa_hf.distribute_attention(build("Llama"))(**TREE | changes)


def test_a_model_with_its_own_attention_and_wrong_positions_are_refused() -> None:
    model, local = dfa_hf.distribute_attention(build("Llama")), TREE
    with pytest.raises(UnsupportedError, match="position_ids from 0 to 7"):
        model(**local | {"position_ids": torch.arange(8)[None]})
    with dfa_hf.local_attention(model), pytest.raises(UnsupportedError, match="a model with its own attention"):
        model(**local)
