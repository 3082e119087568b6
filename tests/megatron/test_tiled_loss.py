"""Scores of a Megatron model whose loss goes by tiles are those of its logits."""

from __future__ import annotations

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from tests.frameworks import megatron_harness as harness
from tests.frameworks.compare import gradients_of
from tests.frameworks.megatron_rows import like
from tests.fuzz.frameworks.megatron_draw import VOCABULARY
from tests.support.workers import run_ranks


def scores(rank: int, world_size: int) -> None:
    """Log-probabilities and entropy of a tied model, and all its gradients, beside those of its own logits."""
    from dfa_megatron.loss import by_document, scores_of

    found = []
    for tile in (7, "off"):
        row = like("plain", {"cp": world_size}, options={"loss_tile": tile})
        row.model["share_embeddings_and_output_weights"] = True
        harness.start(row)
        model, batch = harness.model_of(row), harness.taken(next(harness.batches(row)))
        labels = batch.pop("labels")
        if tile == "off":
            with (
                pytest.raises(UnsupportedError, match="scores_of a GPTModel with 0 losses made by tiles"),
                scores_of(model),
            ):
                pass
            logp = model(**batch).log_softmax(-1)
            logprobs = logp.gather(-1, labels[..., None])[..., 0]
            entropy = -(logp.exp() * logp).sum(-1)
        else:
            with scores_of(model) as seen:
                losses = model(**batch, labels=labels)
            logprobs, entropy = seen.logprobs, seen.entropy
            assert logprobs.shape == entropy.shape == labels.shape
            assert torch.equal(losses, -logprobs)
            assert model(**batch).shape == (row.batch, row.tokens // world_size, VOCABULARY)
        (logprobs.sum() - 2 * entropy.sum()).backward()
        gradients = gradients_of(model, model.cp_group).values()
        found.append([*by_document(logprobs), *by_document(entropy, (0, 9, row.tokens)), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_scores_are_those_of_logits() -> None:
    run_ranks(2, scores, timeout=120)
