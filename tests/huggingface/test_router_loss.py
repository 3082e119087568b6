"""The loss that balances experts is that of whole sequences, with padding and at lengths that ranks do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.support.close import assert_close
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "experts_implementation": "eager"}


def compared(rank: int, ranks: int, kind: str, checkpoint: str) -> None:
    batch = text(2, length := 9 * ranks, seed=4)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, -4 * ranks :] = 0
    padded = batch | {"attention_mask": mask, "labels": batch["labels"].where(mask.bool(), -100)}
    odd = {name: x[:, : length - 1] for name, x in batch.items()}
    for number, whole in enumerate((batch, padded, odd)):
        options = {"router_aux_loss_coef": 0.7, "output_router_logits": True, "num_experts_per_tok": 2, **EXPERTS}
        want, model = (build(kind, **options).double() for _ in range(2))
        reference = want(**whole)
        reference.loss.backward()
        dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint=checkpoint))
        found = model(**whole)
        assert_close(found.aux_loss, reference.aux_loss, tolerance=1e-6, name="the router's loss")
        found.loss.backward()
        assert_loss(found.loss, reference.loss, f"{kind} {number}", 1e-6)
        assert_gradients(model, gradients(want), f"{kind} {number}", 2e-6)


@pytest.mark.support("models", "windows, caps, sinks, experts, RoPE of other lengths: logits, loss, gradients")
@pytest.mark.parametrize(("ranks", "kind", "checkpoint"), [(3, "Mixtral", "none"), (2, "Qwen3Moe", "remat")])
def test_the_loss_of_a_router_and_its_gradients_are_those_of_one_rank(ranks: int, kind: str, checkpoint: str) -> None:
    run_ranks(ranks, compared, kind, checkpoint, timeout=150)
