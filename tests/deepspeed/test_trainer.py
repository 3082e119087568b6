"""HF Trainer and accelerate train with DeepSpeed and sequences that ranks share as they would on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from tests.deepspeed import harness
from tests.huggingface.test_trainer import Sequences, built, history, hits
from tests.support.models import LAYERS, build
from tests.support.workers import run_ranks

COUNT = 16
"""Of sequences."""


def json(stage: int, **block: Any) -> dict[str, Any]:
    names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    settings = {
        **dict.fromkeys(names, "auto"),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return settings | ({"dist_flash_attention": block} if block else {})


def trainer(folder: str, **arguments: Any) -> Any:
    given = {
        "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2, "eval_steps": 1, "adam_epsilon": 1e-8,
        "lr_scheduler_type": "linear", "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    model = build("Llama")
    model.config.use_cache = False  # with a cache transformers does not look for documents
    return built(folder, model=model, train=Sequences(COUNT), eval_dataset=Sequences(COUNT), **{**given, **arguments})


KEYS = ("loss", "eval_loss", "grad_norm", "eval_hits", "num_input_tokens_seen", "learning_rate")


def alone(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    harness.prepare_worker(rank)  # for DDP, of several
    run = trainer(folder, compute_metrics=hits)
    run.train()
    return history(run, KEYS)


STAGES = {2: (0, 1, 2), 4: (3,)}
"""Of ZeRO, by the number of ranks."""


def together(rank: int, world_size: int, folder: str, size: int) -> dict[int, dict[str, list[float]]]:
    harness.prepare_worker(rank)
    from accelerate.state import AcceleratorState

    found = {}
    for stage in STAGES[world_size]:
        block = {"checkpoint": "remat", "loss_tile": 5 if stage in (1, 3) else "off"}
        # With metrics the Trainer reads the logits, which tiles do not make: ZeRO 1. At ZeRO 3 it reads the loss alone.
        settings = json(stage, **block | {"size": size}) if stage % 2 else json(stage)
        run = trainer(folder, compute_metrics=hits if stage < 3 else None, deepspeed=settings)
        options = None if stage % 2 else TrainingConfig(**block)
        for _ in range(2):
            dfa_hf.distribute_trainer(run, size=None if stage % 2 else size, config=options)
        COUNTERS.reset()
        run.train()
        counts = COUNTERS.snapshot()
        assert counts["reused"] == 2 * 2 * LAYERS  # once for each micro-batch and layer
        assert dfa_ds.mesh_of(run.model_wrapped).size == size
        found[stage] = history(run, KEYS)
        AcceleratorState._reset_state()
    if size == world_size:
        contradictions(folder)
    else:
        loops(rank, world_size, size)
    return found


def contradictions(folder: str) -> None:
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    ulysses = {"parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed")}
    for settings, call, more, said in (
        (json(1, size=1), {"size": 2}, {}, "size=2 beside dist_flash_attention.size=1"),
        (json(1) | {"sequence_parallel_size": 1}, {"size": 2}, {}, "sequence_parallel_size=1 beside"),
        (json(1, checkpoint="full"), {"config": TrainingConfig()}, {}, "config beside the block"),
        (json(1), {}, ulysses, r"ParallelismConfig\(sp_size=2\)"),
        (json(1, sizes=2), {}, {}, "sizes"),
    ):
        run = trainer(folder, deepspeed=settings, **more)
        with pytest.raises(UnsupportedError, match=said):
            dfa_hf.distribute_trainer(run, **call)
        AcceleratorState._reset_state()
    run = trainer(folder, deepspeed=json(1) | {"fp16": {"enabled": True}}, fp16=True)
    dfa_hf.distribute_trainer(run)
    with pytest.raises(UnsupportedError, match=r"fp16\.enabled"):
        run.train()


def loops(rank: int, world_size: int, size: int) -> None:
    """A loop of one's own around accelerate counts groups, and the schedule that it prepares ends with its epoch."""
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)  # as Trainer does, else accelerate knows one process on CPUs
    settings = json(1) | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    settings |= {"train_batch_size": "auto", "gradient_clipping": 0.0}
    accelerator, model = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings)), build("Llama")
    dfa_hf.distribute_accelerator(accelerator, model, size=size)
    groups = world_size // size
    assert accelerator.num_processes == groups
    assert accelerator.is_last_process == (rank == world_size - 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=COUNT)
    loaders = [torch.utils.data.DataLoader(Sequences(COUNT), batch_size=1) for _ in range(2)]
    engine, optimizer, loader, whole, schedule = accelerator.prepare(model, optimizer, *loaders, schedule)
    rates, losses = [], []
    for batch in loader:
        rates += schedule.get_last_lr()
        loss = engine(**batch).loss
        losses += accelerator.gather(loss.detach()).tolist()
        accelerator.backward(loss * 0)
        optimizer.step()
        schedule.step()
    rates += schedule.get_last_lr()
    assert engine.train_batch_size() == groups
    engine.eval()
    with torch.no_grad():
        evaluated = [accelerator.gather_for_metrics(engine(**batch).loss[None]) for batch in whole]
    assert rates == pytest.approx([1 - groups * step / COUNT for step in range(COUNT // groups + 1)])
    want = build("Llama")
    wanted = [
        want(**{name: x[None] for name, x in sample.items()}, use_cache=False).loss.item()
        for sample in Sequences(COUNT)
    ]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert torch.cat(evaluated).tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.support("deepspeed", "Hugging Face Trainer, every ZeRO stage")
@pytest.mark.support("deepspeed", "packed documents")
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2)])
def test_trainer_and_loops_are_those_of_one_process_for_each_group_at_every_zero_stage(
    ranks: int, size: int, tmp_path: Any
) -> None:
    """Losses, norms, rates and evaluations are; what contradicts the block is refused."""
    want = run_ranks(ranks // size, alone, str(tmp_path), timeout=120)[0]
    for found in run_ranks(ranks, together, str(tmp_path), size, timeout=170):
        for stage, mine in found.items():
            assert mine["num_input_tokens_seen"] == want["num_input_tokens_seen"]
            assert mine["learning_rate"] == want["learning_rate"]
            assert mine["eval_hits"] == (want["eval_hits"] if stage < 3 else [])
            for name in ("loss", "eval_loss", "grad_norm")[: 2 + (stage > 0)]:  # DeepSpeed knows none at stage 0
                assert mine[name] == pytest.approx(want[name], rel=1e-5), f"ZeRO {stage} {name}"
