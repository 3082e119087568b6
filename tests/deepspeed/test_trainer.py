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
from tests.huggingface.test_packed import pack
from tests.huggingface.test_trainer import hits
from tests.support.models import LAYERS, TRAINING, VOCABULARY, build
from tests.support.workers import run_ranks

LENGTH = 24


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Labels lie unevenly, with holes: with two ranks, the first one has none, or the second, or both have some."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        first, last = ((LENGTH // 2 + 1, LENGTH), (1, LENGTH // 2 + 1), (1, LENGTH))[index % 3]
        kept = first + torch.randperm(last - first, generator=generator)[: 3 + index % 8]
        labels = torch.full_like(ids, -100)
        labels[kept] = ids[kept]
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)}


class Packs(Sequences):
    """Samples of several documents, as a collator would pack them; every other one begins like a plain sequence.

    The labels are the first, the last, or any.
    """

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = {name: rows[0] for name, rows in pack(LENGTH, seed=index).items()}
        if index % 2:
            sample["position_ids"] = torch.cat((torch.arange(12), torch.arange(12)))
        inside = sample["position_ids"].nonzero().flatten()
        mixed = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(index))]
        kept = (inside[:6], inside[-3:], mixed[: 1 + index])[index % 3]
        sample["labels"] = torch.full_like(sample["input_ids"], -100).index_copy(0, kept, sample["input_ids"][kept])
        return sample


def json(stage: int, **block: Any) -> dict[str, Any]:
    names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    settings = {
        **dict.fromkeys(names, "auto"),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return settings | ({"dist_flash_attention": block} if block else {})


def trainer(folder: str, metrics: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {
        **TRAINING,
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_steps": 1,
        "adam_epsilon": 1e-8,
        "lr_scheduler_type": "linear",
        "include_num_input_tokens_seen": "all",
    }
    settled = TrainingArguments(**{**given, **arguments})
    mine = build("Llama")
    mine.config.use_cache = False  # with a cache transformers does not look for documents
    return Trainer(model=mine, args=settled, compute_metrics=metrics, train_dataset=Packs(), eval_dataset=Packs())


KEYS = ("loss", "eval_loss", "grad_norm", "eval_hits", "num_input_tokens_seen", "learning_rate")


def history(of: Any) -> list[list[float]]:
    return [[float(entry[key]) for entry in of.state.log_history if key in entry] for key in KEYS]


def alone(rank: int, world_size: int, folder: str) -> list[list[float]]:
    harness.prepare_worker(rank)  # for DDP, of several
    run = trainer(folder, hits)
    run.train()
    return history(run)


def together(rank: int, world_size: int, folder: str, size: int) -> dict[int, list[list[float]]]:
    harness.prepare_worker(rank)
    from accelerate.state import AcceleratorState

    found = {}
    for stage in (0, 1, 2, 3) if size == world_size else (3,):
        block = {"checkpoint": "remat", "loss_tile": 5 if stage in (1, 3) else "off"}
        # With metrics the Trainer reads the logits, which tiles do not make: ZeRO 1. At ZeRO 3 it reads the loss alone.
        settings = json(stage, **block | {"size": size}) if stage % 2 else json(stage)
        run = trainer(folder, hits if stage < 3 else None, deepspeed=settings)
        options = None if stage % 2 else TrainingConfig(**block)
        for _ in range(2):
            dfa_hf.distribute_trainer(run, size=None if stage % 2 else size, config=options)
        COUNTERS.reset()
        run.train()
        counts = COUNTERS.snapshot()
        assert counts["replays"] == 2 * 2 * LAYERS  # once for each micro-batch and layer
        assert dfa_ds.mesh_of(run.model_wrapped).size == size
        found[stage] = history(run)
        AcceleratorState._reset_state()
    return found


@pytest.mark.support("deepspeed", "Hugging Face Trainer, every ZeRO stage")
@pytest.mark.support("deepspeed", "packed documents")
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2)])
def test_trainer_has_the_losses_norms_and_rates_of_one_process_for_each_group_at_every_zero_stage(
    ranks: int, size: int, tmp_path: Any
) -> None:
    losses, evaluations, norms, right, tokens, rates = run_ranks(ranks // size, alone, str(tmp_path), timeout=120)[0]
    for found in run_ranks(ranks, together, str(tmp_path), size, timeout=170):
        for stage, (mine, evaluated, mine_norms, mine_right, mine_tokens, mine_rates) in found.items():
            assert mine == pytest.approx(losses, rel=1e-5), f"ZeRO {stage}"
            assert evaluated == pytest.approx(evaluations, rel=1e-5), f"ZeRO {stage}"
            assert mine_right == (right if stage < 3 else [])
            assert mine_tokens == tokens
            assert mine_rates == rates
            if stage > 0:  # DeepSpeed knows no norm at stage 0
                assert mine_norms == pytest.approx(norms, rel=1e-5), f"ZeRO {stage}"


def contradictions(rank: int, world_size: int, folder: str) -> None:
    harness.prepare_worker(rank)
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


def test_what_contradicts_the_block_is_refused(tmp_path: Any) -> None:
    run_ranks(2, contradictions, str(tmp_path), timeout=170)


class Loop:
    """A loop of one's own around accelerate, with a schedule that it prepares, over one epoch."""

    def __init__(self, size: int) -> None:
        from accelerate import Accelerator, PartialState
        from accelerate.state import AcceleratorState
        from accelerate.utils import DeepSpeedPlugin

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)  # as Trainer does, else accelerate knows one process on CPUs
        settings = json(1) | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        settings |= {"train_batch_size": "auto", "gradient_clipping": 0.0}
        self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
        self.model = build("Llama")
        dfa_hf.distribute_accelerator(self.accelerator, self.model, size=size)

    def run(self) -> tuple[list[float], list[float], list[float]]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        steps = len(Sequences())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        loaders = [torch.utils.data.DataLoader(Sequences(), batch_size=1) for _ in range(2)]
        engine, optimizer, loader, whole, schedule = self.accelerator.prepare(self.model, optimizer, *loaders, schedule)
        rates, losses = [], []
        for batch in loader:
            rates += schedule.get_last_lr()
            loss = engine(**batch).loss
            losses += self.accelerator.gather(loss.detach()).tolist()
            self.accelerator.backward(loss * 0)
            optimizer.step()
            schedule.step()
        assert engine.train_batch_size() == self.accelerator.num_processes
        engine.eval()
        with torch.no_grad():
            evaluated = [self.accelerator.gather_for_metrics(engine(**batch).loss[None]) for batch in whole]
        return rates + schedule.get_last_lr(), losses, torch.cat(evaluated).tolist()


def loops(rank: int, world_size: int, size: int) -> None:
    harness.prepare_worker(rank)
    groups = world_size // size
    loop = Loop(size)
    assert loop.accelerator.num_processes == groups
    assert loop.accelerator.is_last_process == (rank == world_size - 1)
    rates, losses, evaluated = loop.run()
    steps = len(Sequences())
    assert rates == pytest.approx([1 - groups * step / steps for step in range(steps // groups + 1)])
    want = build("Llama")
    wanted = [
        want(**{name: x[None] for name, x in sample.items()}).loss.item()
        for sample in map(Sequences().__getitem__, range(steps))
    ]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert evaluated == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2)])
def test_an_accelerate_loop_counts_groups_and_its_schedule_ends_with_its_epoch(ranks: int, size: int) -> None:
    run_ranks(ranks, loops, size, timeout=170)
