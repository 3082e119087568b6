"""Under autocast a model with float32 weights computes what it computes on one rank, within bfloat16's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.huggingface.attention_function import attention
from dfa_megatron.huggingface.planned_mask import PlannedMask
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.one_process import assert_gradients, called
from tests.support.close import assert_close
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import over_ranks

PLANNED = PlannedMask()
TOLERANCE = 3e-2
"""Of bfloat16's rounding through two layers with large weights: eager and sdpa on one rank are 1.3e-2 apart."""


def step(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """A forward in bfloat16, and a backward outside of autocast, as PyTorch recommends it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch)
    out.loss.backward()
    return out


@pytest.mark.support("models", "autocast")
@over_ranks(2, timeout=120)
def test_logits_and_gradients_are_those_of_one_rank(rank: int, ranks: int) -> None:
    batch = text(2, 12 * ranks, seed=1, unlabelled=5)
    cases = (("Llama", "auto", "none"), ("Llama", "reference", "remat"), ("Qwen3", "cpu", "full"))
    for kind, kernel, checkpoint in cases:
        reference = build(kind)
        reference.set_attn_implementation("sdpa")
        want = step(reference, batch)
        model = dfa_hf.distribute_attention(build(kind), config=TrainingConfig(kernel=kernel, checkpoint=checkpoint))
        COUNTERS.reset()
        got = step(model, batch)
        assert COUNTERS.attention_forwards == LAYERS * (2 if checkpoint == "full" else 1)
        assert got.logits.dtype is want.logits.dtype is torch.bfloat16
        assert_close(got.logits, shard_sequence(want.logits), tolerance=TOLERANCE, name=f"{kind} logits")
        assert all(gradient.dtype is torch.float32 for gradient in gradients(model).values())
        assert_gradients(model, gradients(reference), kind, TOLERANCE)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_kernels_do_within_autocast_what_they_do_outside(kernel: str) -> None:
    """The reference kernel's own products are in float32, which autocast would round."""
    model = dfa_hf.distribute_attention(build("Llama"), config=TrainingConfig(kernel=kernel))
    layer = model.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 12, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    low = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    with called(layer, 12):
        want, _ = attention(layer, *low, PLANNED)
    with called(layer, 12), torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = attention(layer, q, k, low[2], PLANNED)  # as rotary embeddings leave them
        double, _ = attention(layer, q.double(), k.double(), v.double(), PLANNED)
    assert torch.equal(got, want)
    assert double.dtype is torch.float64  # autocast leaves it alone
