"""The shipped configurations train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from tests.deepspeed import harness
from tests.support.models import build, text
from tests.support.workers import run_ranks

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "configs" / "deepspeed").glob("zero*.json"))


def on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """The same for two ranks without a GPU: nothing to compile, nothing to pin."""
    settings["dist_flash_attention"]["size"] = 2
    settings["optimizer"]["params"]["torch_adam"] = True
    settings["zero_force_ds_cpu_optimizer"] = False
    for name in ("offload_optimizer", "offload_param"):
        settings["zero_optimization"].get(name, {})["pin_memory"] = False
    return settings


def train(rank: int, world_size: int, paths: list[str]) -> dict[str, list[float]]:
    harness.prepare_worker(rank)
    losses = {}
    for path in paths:
        model = build("Qwen2")
        config = on_cpu(json.loads(Path(path).read_text()))
        config["optimizer"]["params"]["lr"] = 0.01
        engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        batch = text(1, 16, seed=1)
        losses[Path(path).stem] = []
        for _ in range(2):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses[Path(path).stem].append(harness.mean_over_ranks(loss))
        engine.destroy()
    return losses


@pytest.mark.support("deepspeed", "every shipped configuration file learns")
def test_the_loss_falls_with_every_shipped_configuration_and_alike() -> None:
    assert len(CONFIGS) == 6
    losses = run_ranks(2, train, [str(path) for path in CONFIGS], timeout=150)[0]
    for name, (first, second) in losses.items():
        assert first > second, name
        assert abs(second - losses["zero1"][1]) < 0.05 * second, name
