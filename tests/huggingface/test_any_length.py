"""A batch of any length, from a token a rank on, is cut over the ranks: as exact as on one."""

from __future__ import annotations

import pytest

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.support.close import assert_close
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks


def exact(rank: int, ranks: int, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        batch = text(2, length, seed=length)
        reference, model = (build("Llama").double() for _ in range(2))
        want = reference(**batch)
        want.loss.backward()
        dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint="remat"))
        got = model(**batch)
        got.loss.backward()
        assert_close(got.logits, shard_sequence(want.logits), tolerance=1e-6, name=f"{length} logits")
        assert_loss(got.loss, want.loss, f"{length}", 1e-6)
        assert_gradients(model, gradients(reference), f"{length}", 1e-6)


@pytest.mark.support("models", "any length, from a token a rank on")
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_logits_loss_and_gradients_are_those_of_one_rank_at_any_length(ranks: int) -> None:
    run_ranks(ranks, exact, (13, 5), timeout=100)
