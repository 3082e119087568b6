"""What a run keeps and where: resuming to the bit, on other numbers of ranks, offloaded, and never whole on a rank."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from tests.deepspeed import harness
from tests.support.models import build, text
from tests.support.workers import over_ranks, run_ranks

SEQUENCES = 4
"""Of a step, however many ranks share one."""


def adam(stage: int, size: int, **zero: Any) -> dict[str, Any]:
    config = harness.settings(stage, size, checkpoint="remat")
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config["zero_optimization"] |= zero
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def start(config: dict[str, Any], seed: int = 0, model: Any = None) -> Any:
    mesh = dfa_ds.make_mesh(config["dist_flash_attention"]["size"])
    config = config | {"gradient_accumulation_steps": SEQUENCES // mesh.data_size}
    return harness.engine_of(config, model or build("Qwen3", seed))


def step(engine: Any, number: int) -> float:
    """One step over the same sequences for any mesh."""
    mesh, losses = dfa_ds.mesh_of(engine), []
    for index in range(mesh.data_rank, SEQUENCES, mesh.data_size):
        losses.append(harness.step(engine, text(1, 24, seed=10 * number + index, unlabelled=3)))
    return harness.mean_over_ranks(torch.stack(losses).mean())


def resume(rank: int, world_size: int, folder: str) -> list[float]:
    """The losses of steps after a checkpoint at ZeRO 3."""
    harness.prepare_worker(rank)
    for stage, sizes in {2: (4,), 3: (2, 1)}.items():
        engine = start(adam(stage, 2))
        step(engine, 1)
        engine.save_checkpoint(folder, tag=f"zero{stage}")
        straight = [step(engine, number) for number in (2, 3)]
        engine.destroy()
        for size in sizes:
            engine = start(adam(stage, size), seed=9)
            engine.load_checkpoint(folder, tag=f"zero{stage}")
            loaded = [step(engine, number) for number in (2, 3)]
            engine.destroy()
            # Sums over a sequence are ordered otherwise on another number of ranks, and that is all.
            want = straight if size == 2 else pytest.approx(straight, rel=1e-4)
            assert loaded == want, f"ZeRO {stage}, size {size}"
    return straight


def losses_of(engine: Any) -> list[float]:
    losses = [step(engine, number) for number in range(3)]
    engine.destroy()
    return losses


@pytest.mark.support("deepspeed", "offload of optimizer and parameters, `zero.Init`")
@over_ranks(2, timeout=170)
def test_offload_and_partitioned_initialization_change_no_loss(rank: int, ranks: int) -> None:
    """They change where a number is, and not the number."""
    import deepspeed

    harness.prepare_worker(rank)
    want = losses_of(start(adam(3, 2)))
    host = {"device": "cpu", "pin_memory": False}
    assert losses_of(start(adam(3, 2, offload_optimizer=dict(host), offload_param=dict(host)))) == pytest.approx(
        want, rel=1e-5
    )
    turns = adam(1, 2, offload_optimizer=dict(host), round_robin_gradients=True)
    assert losses_of(start(turns)) == pytest.approx(want, rel=1e-5)
    whole = build("Qwen3")
    with deepspeed.zero.Init(
        config_dict_or_path={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    ):
        model = type(whole)(copy.deepcopy(whole.config)).train()
    for parameter, given in zip(model.parameters(), whole.parameters(), strict=True):
        assert parameter.numel() == 0  # no rank holds it whole
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(given.data)
    assert losses_of(start(adam(3, 2), model=model)) == pytest.approx(want, rel=1e-5)


def load_universal(rank: int, world_size: int, folder: str) -> list[float]:
    harness.prepare_worker(rank)
    engine = start(adam(3, 1) | {"checkpoint": {"load_universal": True}}, seed=9)
    engine.load_checkpoint(folder, tag="universal")
    losses = [step(engine, number) for number in (2, 3)]
    engine.destroy()
    return losses


@pytest.mark.support("deepspeed", "save, load, other numbers of ranks per sequence")
@pytest.mark.support("deepspeed", "universal checkpoints")
def test_a_loaded_run_continues_to_the_bit_and_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    straight = run_ranks(4, resume, str(tmp_path), timeout=170)[0]
    run_ranks(1, convert, str(tmp_path), timeout=120)
    assert run_ranks(2, load_universal, str(tmp_path), timeout=120)[0] == pytest.approx(straight, rel=1e-4)


def convert(rank: int, world_size: int, folder: str) -> None:
    """What `python -m deepspeed.checkpoint.ds_to_universal` does, without its time to start."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = ["--input_folder", f"{folder}/zero3", "--output_folder", f"{folder}/universal"]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    sys.argv = ["ds_to_universal", *arguments]
    ds_to_universal.main(ds_to_universal.parse_arguments())
