"""`prove` compares an engine at every ZeRO stage, and training then goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.deepspeed.small_engine import small_job
from dfa_megatron.errors import ProofError, UnsupportedError
from tests.deepspeed import harness
from tests.huggingface.test_prove import MISTRAL, labels_of_chunks, lost_window, made, written
from tests.support.models import text
from tests.support.workers import run_ranks


def engine_of(stage: int, dtype: str, prove: bool) -> Any:
    config = harness.settings(stage, 2, prove=prove, checkpoint="remat") | {"gradient_accumulation_steps": 2}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    config |= {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    model = made(dtype=dtype)
    return dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def trained(engine: Any, steps: int = 2) -> list[float]:
    losses = []
    for seed in range(2 * steps):
        loss = engine(**dfa_ds.shard_batch(text(1, 20, seed=seed), group=dfa_ds.mesh_of(engine).group)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


STAGES = [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16")]


def proved(rank: int, world_size: int) -> list[list[str]]:
    harness.prepare_worker(rank)
    return [proved_at(*stage) for stage in STAGES]


def proved_at(stage: int, dtype: str) -> list[str]:
    plain, other = engine_of(stage, dtype, False), engine_of(stage, dtype, True)
    assert trained(other, 1) == trained(plain, 1)
    said = [str(dfa_ds.prove(other))]
    for fault in (labels_of_chunks, lost_window):
        with fault(other.module), pytest.raises(ProofError) as caught:
            dfa_ds.prove(other)
        said.append(str(caught.value))
    assert trained(other, 1) == trained(plain, 1)
    if stage == 1:
        batch = dfa_ds.shard_batch(text(1, 20, seed=1), group=dfa_ds.mesh_of(other).group)
        other.backward(other(**batch).loss)
        other.step()
        with pytest.raises(UnsupportedError, match="after 1 of a step's 2 micro-batches"):
            dfa_ds.prove(other)
        plain.optimizer.average_tensor = lambda *args, **kwargs: None
        with pytest.raises(ProofError, match="first difference: a sequence, 96 tokens, gradient of parameters: "):
            dfa_ds.prove(plain)
    for engine in (plain, other):
        engine.destroy()
    return said


def test_an_engine_is_proved_at_every_stage_and_trains_as_before() -> None:
    one, other = run_ranks(2, proved, timeout=120)
    assert one == other
    for (stage, _), (clean, labels, window) in zip(STAGES, one, strict=True):
        assert f"ZeRO {stage}" in clean
        assert "2 ranks compute what one rank computes" in clean
        assert "gradient at layers: model.layers.1 on rank 0, token" in labels.partition("first difference: ")[2]
        assert "output of layers: model.layers.0.self_attn on rank 0" in window.partition("first difference: ")[2]


def small_engine(rank: int, world_size: int, words: list[str]) -> str:
    harness.prepare_worker(rank)
    return str(small_job(words).prove())


def test_a_json_is_proved_with_a_small_model(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "wandb": {"enabled": True},
        "dist_flash_attention": {"enabled": True, "checkpoint": "remat", "loss_tile": 5},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    words = [str(path), "--model", written(tmp_path, MISTRAL)]
    for table in run_ranks(2, small_engine, words, timeout=120):
        assert "ZeRO 3" in table
        assert "2 ranks compute what one rank computes" in table
    job = small_job([*words, "--ranks", "3"])
    assert job.ranks == 3
    assert {"gradient_accumulation_steps", "zero_optimization.offload_optimizer", "bf16"} <= {
        line.split()[0] for line in str(job).splitlines()
    }
    for changed, wanted in (
        ({"dist_flash_attention": {"enabled": False}}, "no enabled block"),
        ({"dist_flash_attention": {"enabled": True, "size": 2}}, "--ranks=3 beside"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ):
        path.write_text(json.dumps(given | changed), encoding="utf-8")
        with pytest.raises(UnsupportedError, match=wanted):
            small_job([*words, "--ranks", "3"])
    with pytest.raises(UnsupportedError, match="it is no JSON"):
        small_job([__file__, "--model", "llama"])
