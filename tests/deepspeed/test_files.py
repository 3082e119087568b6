"""The shipped configurations train, and so does the example, from nothing but its JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from tests.deepspeed import harness
from tests.support.groups import free_port, run_script
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
        batch = dfa_ds.shard_batch(text(1, 16, seed=1), group=dfa_ds.mesh_of(engine).group)
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


def losses_of(launcher: list[str], script: str, folder: Path, *flags: str, **environment: str) -> list[float]:
    """What an example prints, started as a user would."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / script), "--seq-length", "128", "--train-iters", "8", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("is deprecated") == 0, "warnings at every step hide what a run says"
    return losses_in(done.stdout)


def losses_in(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\bloss'?:? '?(\d+\.?\d*)", said)]


def learn(rank: int, world_size: int, port: int, folder: str) -> list[float]:
    """What Trainer prints on the first rank."""
    script, flags = str(ROOT / "examples" / "train_trainer.py"), ("--seq-length", "128", "--train-iters", "15")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_script(rank, world_size, port, script, folder, flags)
    return losses_in(said.getvalue())


def test_the_trainer_example_learns_on_two_ranks_that_torchrun_starts(tmp_path: Path) -> None:
    losses = run_ranks(2, learn, free_port(), str(tmp_path), timeout=150)[0]
    assert len(losses) == 15
    assert losses[0] > 5.0
    assert losses[-1] < losses[0] - 1.0


def test_the_deepspeed_example_learns_on_two_ranks_that_deepspeeds_launcher_starts(tmp_path: Path) -> None:
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
    ]
    config = str(ROOT / "examples" / "train_deepspeed.json")
    losses = losses_of(launcher, "train_deepspeed.py", tmp_path, "--deepspeed_config", config, TORCHDYNAMO_DISABLE="1")
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
