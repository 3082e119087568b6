"""`prove` compares an engine of every optimizer of ZeRO, and training then goes on as if it had not."""

from __future__ import annotations

from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import ProofError, UnsupportedError
from tests.deepspeed import harness
from tests.huggingface.test_prove import labels_of_chunks, lost_window, made
from tests.support.models import text
from tests.support.workers import by_turns, run_ranks


def engine_of(stage: int, dtype: str, prove: bool) -> Any:
    config = harness.settings(stage, 2, prove=prove, checkpoint="remat") | {"gradient_accumulation_steps": 2}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    config |= {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    return harness.engine_of(config, made(dtype=dtype))


def trained(engine: Any) -> list[float]:
    return [harness.step(engine, text(1, 20, seed=seed)).item() for seed in range(2)]


STAGES = [(1, "float32"), *by_turns([(0, "float32"), (3, "bfloat16")])]
"""ZeRO 2 has the optimizer of ZeRO 1."""


def proved(rank: int, world_size: int) -> list[list[str]]:
    harness.prepare_worker(rank)
    return [proved_at(*stage) for stage in STAGES]


def proved_at(stage: int, dtype: str) -> list[str]:
    plain, other = engine_of(stage, dtype, False), engine_of(stage, dtype, True)
    assert trained(other) == trained(plain)
    said = [str(dfa_ds.prove(other))]
    for fault in (labels_of_chunks, *((lost_window,) if stage == 1 else ())):  # the first one is of gradients
        with fault(other.module), pytest.raises(ProofError) as caught:
            dfa_ds.prove(other)
        said.append(str(caught.value))
    assert trained(other) == trained(plain)
    if stage == 1:
        harness.step(other, text(1, 20, seed=1))
        with pytest.raises(UnsupportedError, match="after 1 of a step's 2 micro-batches"):
            dfa_ds.prove(other)
        plain.optimizer.average_tensor = lambda *args, **kwargs: None
        with pytest.raises(ProofError, match="first difference: a sequence, 96 tokens, gradient of parameters: "):
            dfa_ds.prove(plain)
    for engine in (plain, other):
        engine.destroy()
    return said


def test_an_engine_is_proved_with_every_optimizer_of_zero_and_trains_as_before() -> None:
    one, other = run_ranks(2, proved, timeout=120)
    assert one == other
    for (stage, _), (clean, labels, *window) in zip(STAGES, one, strict=True):
        assert f"ZeRO {stage}" in clean
        assert "2 ranks compute what one rank computes" in clean
        assert "gradient at layers: model.layers.1 on rank 0, token" in labels.partition("first difference: ")[2]
        assert len(window) == (stage == 1)
        for said in window:
            assert "output of layers: model.layers.0.self_attn on rank 0" in said.partition("first difference: ")[2]
