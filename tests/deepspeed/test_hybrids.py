"""Hybrids through DeepSpeed's block have the gradients of one process at ZeRO 0 and 3, rematerialized."""

from __future__ import annotations

import gc

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from tests.deepspeed import harness
from tests.huggingface.test_packed import one_by_one, pack
from tests.support.close import assert_close
from tests.support.workers import run_ranks

HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "minimax", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)


STAGES = {"nemotron_h": (0, 3), "qwen3_next": (0, 3)} | {
    kind: (3 * (at % 2),) for at, kind in enumerate(HYBRIDS) if kind not in ("nemotron_h", "qwen3_next")
}
"""Of ZeRO; the others take turns."""


def gradients(rank: int, world_size: int, kinds: tuple[str, ...]) -> None:
    from deepspeed.utils import safe_get_full_grad

    from tests.huggingface.sweep.tiny import build

    harness.prepare_worker(rank)
    gc.freeze()  # DeepSpeed collects garbage as each engine starts
    whole = pack(12 * world_size, seed=4)
    for kind in kinds:
        reference = build(kind).float()
        one_by_one(reference, whole)[1].backward()
        want = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in reference.named_parameters()}
        largest = max(gradient.abs().max() for gradient in want.values())
        for stage in STAGES[kind]:
            model = build(kind).float()
            config = harness.settings(stage, world_size, checkpoint="remat")
            engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            batch = dfa_ds.shard_batch(whole, group=dfa_ds.mesh_of(engine).group)
            engine.backward(engine(**batch).loss)
            for name, parameter in engine.module.named_parameters():
                gradient = safe_get_full_grad(parameter)
                got = torch.zeros_like(want[name]) if gradient is None else gradient.view_as(want[name])
                # States are in float32, with sums of many exponentials.
                assert_close(got / largest, want[name] / largest, tolerance=1e-3, name=f"{kind} ZeRO {stage} {name}")
            engine.step()
            engine.destroy()


@pytest.mark.support("deepspeed", "hybrids, rematerialized, at ZeRO 0 and 3")
def test_gradients_of_hybrids_are_those_of_one_process() -> None:
    run_ranks(2, gradients, HYBRIDS, timeout=170)
