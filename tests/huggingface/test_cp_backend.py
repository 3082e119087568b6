"""accelerate's own field, flags and launcher say that ranks share sequences: with patches/accelerate, or without."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import hooks
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.test_trainer import alone, history, hits, parameters_of, prepare_worker, trainer
from tests.support.models import build
from tests.support.pages import ROOT
from tests.support.workers import run_ranks
from tests.test_patches import git_apply


def take_patched(folder: str) -> None:
    """Let this process, which has imported accelerate, have the patched files of it."""
    import accelerate
    from accelerate import accelerator, parallelism_config
    from accelerate.commands import launch
    from transformers import trainer as trainers

    for module in (parallelism_config, accelerator, launch):
        source = Path(folder, *module.__name__.split(".")).with_suffix(".py").read_text("utf-8")
        exec(compile(source, module.__name__, "exec"), vars(module))  # noqa: S102 (accelerate's, with our patch)
    accelerate.ParallelismConfig = parallelism_config.ParallelismConfig
    accelerate.Accelerator = trainers.Accelerator = accelerator.Accelerator


def of_launcher(*flags: str) -> dict[str, str]:
    """What `accelerate launch` tells the ranks of a script."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "no", "--use_parallelism_config", *flags, "x"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(given))
    return {name: value for name, value in prepare_multi_gpu_env(args).items() if "PARALLELISM_CONFIG" in name}


def by_flags(rank: int, world_size: int, folder: str) -> Any:
    """Train with the patched accelerate, by the launcher's flags alone."""
    prepare_worker(rank, world_size)
    take_patched(folder)
    os.environ.update(of_launcher("--parallelism_config_cp_size", "2", "--parallelism_config_cp_backend", "dfa"))
    run = trainer(folder, 1, compute_metrics=hits)
    run.train()
    return history(run), parameters_of(run), hooks.replaced()


def test_a_trainer_by_the_flags_of_a_patched_launcher_is_that_of_one_process(tmp_path: Path) -> None:
    import accelerate

    patch = ROOT / "patches" / "accelerate" / f"v{importlib.metadata.version('accelerate')}.patch"
    if not patch.exists():
        pytest.skip("there is no patch for the installed version")
    for name in re.findall(r"^--- a/(.*)$", patch.read_text("utf-8"), re.MULTILINE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(accelerate.__file__).parents[1] / name, tmp_path / name)
    git_apply(patch, tmp_path)
    ((wanted, parameters, *_),) = run_ranks(1, alone, str(tmp_path / "one"), timeout=120)
    for found, mine, replaced in run_ranks(2, by_flags, str(tmp_path), timeout=120):
        for name, values in wanted.items():
            assert found[name] == pytest.approx(values, rel=1e-5), name
        torch.testing.assert_close(mine, parameters, rtol=1e-4, atol=1e-6)
        assert not [name for name in replaced if name.endswith("__init__")]


def refused(rank: int, world_size: int) -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState

    prepare_worker(rank, world_size)
    dfa_hf.add_cp_backend()
    with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size 2, but found 6 ranks"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=3, cp_size=2, cp_backend="dfa"))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(UnsupportedError, match="size=4 on 2 ranks"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=4, cp_backend="dfa"))
    with pytest.raises(UnsupportedError, match="TrainingConfig"):
        ParallelismConfig(cp_size=2, cp_backend="dfa", cp_handler="remat")
    with pytest.raises(ValueError, match="cp_backend must be one of"):
        ParallelismConfig(cp_size=2, cp_backend="ring")
    told: dict[str, Any] = {"cp_size": 2, "cp_backend": "dfa", "cp_handler": TrainingConfig(checkpoint="remat")}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**told))
    with pytest.raises(UnsupportedError, match="size=1 for a second model"):
        dfa_hf.distribute_accelerator(accelerator, build("Llama"), size=1)
    with pytest.raises(UnsupportedError, match="no transformers model was found"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    ours = {"ParallelismConfig.__post_init__", "Accelerator.__init__", "Trainer.train", "Trainer.evaluate"}
    assert {*hooks.replaced()} == {*ours, "Trainer.predict"}
    assert all(f"`{name.rpartition('.')[2]}`" in page for name in hooks.replaced())
    hooks.restore()
    assert hooks.replaced() == []
    with pytest.raises(ValueError, match="cp_backend must be one of"):
        ParallelismConfig(cp_size=2, cp_backend="dfa")


def test_sizes_that_do_not_fit_are_refused_and_the_names_can_be_put_back() -> None:
    run_ranks(2, refused)
