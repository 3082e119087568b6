"""HF Trainer and accelerate, unchanged, train with distributed attention as they would on one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from tests.deepspeed import harness
from tests.huggingface.test_packed import pack
from tests.huggingface.test_trainer import hits
from tests.support.models import LAYERS, TRAINING, VOCABULARY, build
from tests.support.workers import run_ranks

LENGTH = 24


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Labels lie unevenly, with holes: with two ranks, the first one has none, or the second, or both have some.

    Each sequence has ten, as Trainer's loss with DeepSpeed weighs micro-batches alike.
    """

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        first, last = ((LENGTH // 2 + 1, LENGTH), (1, LENGTH // 2 + 1), (1, LENGTH))[index % 3]
        kept = first + torch.randperm(last - first, generator=generator)[:10]
        labels = torch.full_like(ids, -100)
        labels[kept] = ids[kept]
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)}


class Packs(Sequences):
    """Samples of several documents, as a collator would pack them; every other one begins like a plain sequence.

    Each has six labels: the first, the last, or any.
    """

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = {name: rows[0] for name, rows in pack(LENGTH, seed=index).items()}
        if index % 2:
            sample["position_ids"] = torch.cat((torch.arange(12), torch.arange(12)))
        inside = sample["position_ids"].nonzero().flatten()
        mixed = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(index))]
        kept = (inside[:6], inside[-6:], mixed[:6])[index % 3]
        sample["labels"] = torch.full_like(sample["input_ids"], -100).index_copy(0, kept, sample["input_ids"][kept])
        return sample


def parallelism(size: int) -> dict[str, Any]:
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    config = ParallelismConfig(
        sp_size=size, dp_replicate_size=dist.get_world_size() // size, sp_backend="deepspeed", sp_handler=handler
    )
    return {"parallelism_config": config}


def model() -> Any:
    built = build("Llama")
    built.set_attn_implementation("sdpa")  # Ulysses refuses eager, so that is what accelerate's users have
    return built


def json(stage: int, **block: Any) -> dict[str, Any]:
    names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    return {
        **dict.fromkeys(names, "auto"),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "dist_flash_attention": block,
    }


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
        "lr_scheduler_type": "constant",
        "include_num_input_tokens_seen": "all",
    }
    settled = TrainingArguments(**{**given, **arguments})
    mine = model()
    mine.config.use_cache = False  # with a cache transformers does not look for documents
    return Trainer(model=mine, args=settled, compute_metrics=metrics, train_dataset=Packs(), eval_dataset=Packs())


KEYS = ("loss", "eval_loss", "grad_norm", "eval_hits", "num_input_tokens_seen")


def history(of: Any) -> list[list[float]]:
    return [[float(entry[key]) for entry in of.state.log_history if key in entry] for key in KEYS]


def alone(rank: int, world_size: int, folder: str) -> list[list[float]]:
    run = trainer(folder, hits)
    run.train()
    return history(run)


def together(rank: int, world_size: int, folder: str) -> dict[int, list[list[float]]]:
    harness.prepare_worker(rank)
    from accelerate.state import AcceleratorState

    dfa_ds.install()
    found = {}
    for stage in (0, 1, 2, 3):
        block = {"checkpoint": "remat", "loss_tile": 5 if stage in (1, 3) else "off"}
        # With metrics the Trainer reads the logits, which tiles do not make: ZeRO 1. At ZeRO 3 it reads the loss alone.
        run = trainer(folder, hits if stage < 3 else None, deepspeed=json(stage, **block), **parallelism(world_size))
        COUNTERS.reset()
        run.train()
        counts = COUNTERS.snapshot()
        micro_batches = 2 * 2
        assert counts["attention_forwards"] == counts["replays"] == micro_batches * LAYERS  # none in evaluation
        assert dfa_ds.mesh_of(run.model_wrapped).size == world_size
        found[stage] = history(run)
        AcceleratorState._reset_state()
    return found


@pytest.mark.support("deepspeed", "Hugging Face Trainer, every ZeRO stage")
@pytest.mark.support("deepspeed", "packed documents")
def test_trainer_has_the_losses_and_gradient_norms_of_one_process_at_every_zero_stage(tmp_path: Any) -> None:
    losses, evaluations, norms, right, tokens = run_ranks(1, alone, str(tmp_path), timeout=120)[0]
    for found in run_ranks(2, together, str(tmp_path), timeout=170):
        for stage, (mine, evaluated, mine_norms, mine_right, mine_tokens) in found.items():
            assert mine == pytest.approx(losses, rel=1e-4), f"ZeRO {stage}"
            assert evaluated == pytest.approx(evaluations, rel=1e-4), f"ZeRO {stage}"
            assert mine_right == (right if stage < 3 else [])
            assert mine_tokens == tokens
            if stage > 0:  # DeepSpeed knows no norm at stage 0
                assert mine_norms == pytest.approx(norms, rel=1e-4), f"ZeRO {stage}"


def other_ways(rank: int, world_size: int, folder: str) -> None:
    harness.prepare_worker(rank)
    from accelerate.state import AcceleratorState
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups

    dfa_ds.install()
    without = trainer(folder, deepspeed=json(1))
    with pytest.raises(UnsupportedError, match=r"ParallelismConfig\(sp_size=2"):
        without.train()
    AcceleratorState._reset_state()
    differing = trainer(folder, deepspeed=json(1, size=1), **parallelism(2))
    with pytest.raises(UnsupportedError, match="beside dist_flash_attention"):
        differing.train()
    AcceleratorState._reset_state()

    accelerated(world_size)
    dfa_ds.install()  # a second time changes nothing
    dfa_ds.uninstall()
    assert not hasattr(UlyssesSPAttentionHF.__dict__["register_with_transformers"], "_dfa_original")
    assert groups.mpu is None
    AcceleratorState._reset_state()

    dfa_ds.install()
    ulysses = trainer(folder, deepspeed=json(1, enabled=False), **parallelism(2))
    COUNTERS.reset()
    ulysses.train()  # the block is not enabled: DeepSpeed's own attention
    assert COUNTERS.snapshot()["attention_forwards"] == 0


def accelerated(size: int) -> None:
    """A loop of one's own around accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    settings = json(2, checkpoint="remat") | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    settings |= {"train_batch_size": 1, "gradient_clipping": 0.0}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), **parallelism(size))
    mine = model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(Sequences(), batch_size=1)
    engine, optimizer, loader = accelerator.prepare(mine, optimizer, loader)
    group = dfa_ds.mesh_of(engine).group
    batch = next(iter(loader))
    assert batch["input_ids"].shape == (1, LENGTH // size)
    labels = batch.pop("shift_labels")
    loss = dfa_ds.loss(engine(**batch).logits, labels, group=group)
    accelerator.backward(loss)
    want = model()(**{key: value[None] for key, value in Sequences()[0].items()}).loss
    assert harness.mean_over_ranks(loss) == pytest.approx(want.item(), rel=1e-5)


def evaluated(rank: int, world_size: int) -> None:
    """Loaders that accelerate cuts because they are prepared with the model, and one that it does not."""
    harness.prepare_worker(rank)
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    dfa_ds.install()
    settings = json(2) | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    settings |= {"train_batch_size": 1, "gradient_clipping": 0.0}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), **parallelism(world_size))
    optimizer = torch.optim.SGD((mine := model()).parameters(), lr=0.0)
    loaders = [torch.utils.data.DataLoader(Sequences(), batch_size=1) for _ in range(3)]
    engine, _, _, cut = accelerator.prepare(mine, optimizer, *loaders[:2])
    whole = accelerator.prepare(loaders[2])
    engine.eval()
    batch = dict(next(iter(cut)))
    labels = batch.pop("shift_labels")
    with pytest.raises(UnsupportedError, match="from 12 to 23 in evaluation") if rank else nullcontext():
        engine(**batch)
    want = model().eval()
    given = next(iter(whole))
    with torch.no_grad():
        assert given["input_ids"].shape == (1, LENGTH)
        assert engine(**given).loss.item() == pytest.approx(want(**given).loss.item(), rel=1e-5)
        engine.train()
        loss = dfa_ds.loss(engine(**batch).logits, labels, group=dfa_ds.mesh_of(engine).group)
        want_cut = want(**{key: value[None] for key, value in Sequences()[0].items()}).loss
    assert harness.mean_over_ranks(loss) == pytest.approx(want_cut.item(), rel=1e-5)


def test_an_evaluation_loader_that_accelerate_cuts_is_refused_and_a_whole_one_is_not() -> None:
    run_ranks(2, evaluated, timeout=120)


def test_accelerate_alone_contradictions_and_ulysses_when_the_block_is_not_enabled(tmp_path: Any) -> None:
    run_ranks(2, other_ways, str(tmp_path), timeout=170)


class Loop:
    """A loop of one's own around accelerate, with a schedule that it prepares, over one epoch."""

    def __init__(self, size: int, **more: Any) -> None:
        from accelerate import Accelerator, PartialState
        from accelerate.state import AcceleratorState
        from accelerate.utils import DeepSpeedPlugin

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)  # as Trainer does, else accelerate knows one process on CPUs
        settings = json(1) | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        settings |= {"train_batch_size": "auto", "gradient_clipping": 0.0}
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
        self.accelerator = Accelerator(deepspeed_plugin=plugin, **parallelism(size), **more)

    def rates(self, steps: int) -> list[float]:
        mine = model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        loader = torch.utils.data.DataLoader(Sequences(), batch_size=1)
        engine, optimizer, loader, schedule = self.accelerator.prepare(mine, optimizer, loader, schedule)
        group, found = dfa_ds.mesh_of(engine).group, []
        for batch in loader:
            found += schedule.get_last_lr()
            loss = dfa_ds.loss(
                engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits,
                batch["shift_labels"],
                group=group,
            )
            self.accelerator.backward(loss * 0)
            optimizer.step()
            schedule.step()
        assert engine.train_batch_size() == self.accelerator.num_processes
        return found + schedule.get_last_lr()


def schedules(rank: int, world_size: int, folder: str) -> None:
    harness.prepare_worker(rank)
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    size, groups = 2, world_size // 2
    dfa_ds.install()
    steps = len(Sequences()) // groups  # of an epoch, in which every step takes a sequence for each group
    wanted = [1 - step / steps for step in range(steps + 1)]
    assert Loop(size).rates(len(Sequences())) == pytest.approx(wanted)
    loop = Loop(size)
    assert loop.accelerator.num_processes == groups
    assert loop.accelerator.is_last_process == (rank == world_size - 1)
    assert loop.rates(steps * loop.accelerator.num_processes) == pytest.approx(wanted)
    loop = Loop(size, dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(UnsupportedError, match="split_batches"):
        loop.rates(steps)
    AcceleratorState._reset_state()
    by_trainer = trainer(folder, deepspeed=json(1), **parallelism(size))
    with pytest.raises(UnsupportedError, match="HF Trainer with 2 sequences at a time over gloo"):
        by_trainer.train()
    AcceleratorState._reset_state()
    dfa_ds.uninstall()
    assert "num_processes" not in vars(AcceleratorState)
    assert Loop(size).accelerator.num_processes == world_size


def test_a_prepared_schedule_of_an_accelerate_loop_ends_with_its_epoch(tmp_path: Any) -> None:
    run_ranks(4, schedules, str(tmp_path), timeout=170)
