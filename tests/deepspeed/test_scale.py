"""How DeepSpeed scales gradients: the one way in that is the same at every ZeRO stage, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import DistFlashAttention
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import UnsupportedError
from tests.deepspeed import harness
from tests.support.workers import run_ranks

STAGES = (0, 1, 2, 3)


def ratio(rank: int, world_size: int, settings: dict[str, Any], mpu: Any = None) -> float:
    """The gradient that DeepSpeed applies over the true one, for the loss P * (my tokens' share of the mean)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = torch.nn.Linear(4, 1, bias=False)
    tokens = torch.arange(4.0 * 4).view(4, 4) + 1  # a sequence of 4 tokens, divided among the ranks
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=dict(settings), mpu=mpu
    )
    engine.backward(world_size * engine(tokens.chunk(world_size)[rank]).sum() / len(tokens))
    gradient = safe_get_full_grad(engine.module.weight).flatten()
    engine.destroy()
    return float((gradient / tokens.mean(0)).mean())


def plain(stage: int, **keys: Any) -> dict[str, Any]:
    settings = {**harness.settings(stage), **keys}
    del settings["dist_flash_attention"]
    return settings


def by_mpu(rank: int, world_size: int) -> list[float]:
    harness.prepare_worker(rank)
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(world_size)
    ratios = [ratio(rank, world_size, plain(stage), parallel_state_sp) for stage in STAGES]
    model = torch.nn.Sequential(DistFlashAttention(causal=True), torch.nn.Linear(4, 1))
    with pytest.raises(UnsupportedError, match="made in this process before"):
        dfa_ds.initialize(
            model=model, model_parameters=list(model.parameters()), config=harness.settings(1, world_size)
        )
    return ratios


def test_an_mpu_sums_below_stage_3_and_is_refused() -> None:
    """Should a version of DeepSpeed make this fail, the reason to refuse an mpu is gone."""
    for ratios in run_ranks(2, by_mpu, timeout=120):
        assert ratios == pytest.approx([2.0, 2.0, 2.0, 1.0], rel=1e-6)
