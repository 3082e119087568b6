"""A loop around accelerate, as users write it, trains, resumes amid an epoch and evaluates as one process does.

Whatever accelerate counts or scales by processes is that of one process a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.test_trainer import Sequences, prepare_worker
from tests.support.close import assert_close
from tests.support.models import build, gradients
from tests.support.workers import over_ranks, run_ranks

ACCUMULATE = 2
TOLERANCE = 1e-6
"""transformers computes its loss in float32, whatever the model's dtype."""

Batch = dict[str, torch.Tensor]


def tiny() -> tuple[Any, torch.optim.Optimizer]:
    """A model whose layers have windows, which accelerate's own context parallelism would lose, and its optimizer."""
    model = build("Mistral", sliding_window=6).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def labelled(batch: Batch) -> torch.Tensor:
    return (batch["labels"][..., 1:] != -100).sum()


def one_process(model: Any, samples: list[Batch]) -> torch.Tensor:
    """The summed loss of all labelled tokens, over their number."""
    sums = []
    for sample in samples:
        inputs = {name: sample[name][None] for name in ("input_ids", "position_ids")}
        scores = model(**inputs, use_cache=False).logits[0, :-1]
        sums.append(torch.nn.functional.cross_entropy(scores, sample["labels"][1:], reduction="sum"))
    return torch.stack(sums).sum() / sum(map(labelled, samples))


class Reference:
    """One process that sees the samples of every step of all groups."""

    def __init__(self, data: int) -> None:
        self.each, self.samples = ACCUMULATE * data, Sequences(2 * ACCUMULATE * data + 1)
        self.model, self.optimizer = tiny()

    def step(self, number: int) -> tuple[torch.Tensor, Batch]:
        """Its loss and its gradients, clipped."""
        epoch, step = divmod(number, 2)
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(epoch)).tolist()
        loss = one_process(self.model, [self.samples[at] for at in order[self.each * step : self.each * (step + 1)]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        found = gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), found


def sharded() -> dict[str, Any]:
    """The arguments for FSDP2, which accelerate knows on GPUs only: it is told that it has some."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = "MULTI_GPU"
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["MistralDecoderLayer"]}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)}


class Loop:
    """A loop from its start, whose epochs have an order of their own; it keeps the losses and gradients of its steps.

    accelerate saves and loads how many steps it has done. `by_config`: it says so in a ParallelismConfig alone.
    """

    def __init__(self, context: int, data: int, fsdp: bool, *, by_config: bool = False) -> None:
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.state import AcceleratorState
        from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

        AcceleratorState._reset_state(reset_partial_state=True)
        self.done, self.losses, self.gradients = 0, list[torch.Tensor](), list[Batch]()
        options = TrainingConfig(checkpoint="remat", loss_tile=7)
        told: dict[str, Any] = {"cp_size": context, "cp_backend": "dfa", "cp_handler": options} if by_config else {}
        told["dp_shard_size"] = data * (1 if by_config else context) if fsdp else 1
        parallel = {"parallelism_config": ParallelismConfig(**told)} if by_config or fsdp else {}
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=ACCUMULATE, sync_with_dataloader=False),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
            **parallel, **(sharded() if fsdp else {}),
        )  # fmt: skip
        own, optimizer = tiny()
        if not by_config:
            size = None if data == 1 else context
            assert dfa_hf.distribute_accelerator(self.accelerator, own, size=size, config=options) == context
        assert self.accelerator.num_processes == data
        loaders = [
            torch.utils.data.DataLoader(Sequences(2 * ACCUMULATE * data + 1), batch_size=1, shuffle=True),
            torch.utils.data.DataLoader(Sequences(5, seed=50), batch_size=1),
        ]
        prepared = self.accelerator.prepare(own, optimizer, *loaders)
        self.model, self.optimizer, self.loader, self.others = prepared
        self.accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def whole_gradients(self) -> Batch:
        from torch.distributed.tensor import DTensor

        found = gradients(self.accelerator.unwrap_model(self.model))
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}

    def step(self, batches: Sequence[Batch]) -> None:
        """Train on the micro-batches; `backward` divides by their number, and DDP and FSDP by the ranks."""
        accelerator = self.accelerator
        count = accelerator.gather(torch.stack([labelled(batch) for batch in batches]).sum()).sum().clamp(min=1)
        share, total = count / accelerator.num_processes / ACCUMULATE, torch.zeros(())
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch, num_items_in_batch=share).loss
                accelerator.backward(loss)
                total += loss.detach() / ACCUMULATE
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.gradients.append(self.whole_gradients())
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.losses.append(accelerator.reduce(total, "mean"))

    def train(self, until: int) -> None:
        """Train until so many steps are done since the first run, whole epochs or not."""
        while self.done < until:
            epoch, done = divmod(self.done, len(self.loader) // ACCUMULATE)
            rest = self.accelerator.skip_first_batches(self.loader, done * ACCUMULATE)
            for each in (self.loader, rest):  # before accelerate 1.15 the order of `rest` would be the first one's
                each.set_epoch(epoch)
            for batches in zip(*[iter(rest)] * ACCUMULATE, strict=False):  # the rest of an epoch is less than a step
                self.step(batches)
                self.done += 1
                if self.done == until:
                    break

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        sums = []
        for batch in self.others:
            count = labelled(batch)
            row = torch.stack((self.model(**batch).loss * count, count.double()))[None]
            sums.append(self.accelerator.gather_for_metrics(row))
        loss, count = torch.cat(sums).sum(dim=0).unbind()
        return loss / count


@pytest.mark.parametrize(("ranks", "context"), [(4, 2), (3, 3)])
@over_ranks(timeout=120)
def test_accumulation_resume_and_evaluation_of_an_accelerate_loop_are_those_of_one_process(
    rank: int, ranks: int, context: int, tmp_path: Path
) -> None:
    prepare_worker(rank, ranks)
    dfa_hf.add_cp_backend()
    torch.set_default_dtype(torch.float64)
    data = ranks // context
    for fsdp in (False, True)[: 1 + (data > 1)]:
        reference, first = Reference(data), Loop(context, data, fsdp, by_config=True)
        first.train(1)
        first.accelerator.save_state(f"{tmp_path}/{fsdp}")
        loop = Loop(context, data, fsdp)  # a new start in the middle of the first epoch
        loop.accelerator.load_state(f"{tmp_path}/{fsdp}")
        loop.train(3)
        found = [*zip(first.losses + loop.losses, first.gradients + loop.gradients, strict=True)]
        assert len(found) == 3
        for step, (loss, mine) in enumerate(found):
            want, wanted = reference.step(step)
            assert_close(loss, want, tolerance=TOLERANCE, name=f"loss of step {step}")
            for name, gradient in wanted.items():
                assert_close(mine[name], gradient, tolerance=TOLERANCE, name=f"{name} of step {step}")
        batch = {name: value[None] for name, value in Sequences(1)[0].items()}
        with torch.no_grad():
            want = one_process(reference.model, [Sequences(5, seed=50)[index] for index in range(5)])
            assert_close(loop.evaluate(), want, tolerance=TOLERANCE, name="evaluation")
            counted = [run.eval()(**batch, num_items_in_batch=7).loss for run in (loop.model, reference.model)]
        assert_close(*counted, tolerance=TOLERANCE, name="loss over a count given by hand")
        beside(loop, context, data)


def beside(loop: Loop, context: int, data: int) -> None:
    """A teacher beside the model, and what is refused beside it."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    dfa_hf.distribute_accelerator(loop.accelerator, build("Llama").eval(), size=context)
    for training in (True, False):
        loop.model.train(training)
        assert len(loop.accelerator.gather_for_metrics(torch.ones(1))) == data
    if data > 1:
        with pytest.raises(UnsupportedError, match="size=4 for a second model"):
            dfa_hf.distribute_accelerator(loop.accelerator, build("Llama"), size=4)
    model = dfa_hf.distribute_attention(build("Llama"))
    _attach_context_parallel_hooks(model)  # as accelerate alone does
    with pytest.raises(UnsupportedError, match=r"accelerate's context parallelism.*distribute_accelerator"):
        model(input_ids=torch.arange(4)[None])


STEPS, ACCUMULATE = 4, 2


def warm_up(optimizer: Any, steps: int) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: min(step / 3, max(steps - step, 0) / steps))


SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "one cycle, shorter than the run": lambda optimizer, steps: schedulers.OneCycleLR(optimizer, 1.0, steps - 2),
    "warm-up": warm_up,
    "one after another": lambda optimizer, steps: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer, 0.1, 2), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


def started(size: int, model: Any = None, **more: Any) -> Any:
    """An accelerator, whose ranks share sequences where `size` is more than one."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(reset_partial_state=True)
    split = more.pop("split_batches", False)
    settled = DataLoaderConfiguration(split_batches=split, use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=settled, **more)
    if size > 1:
        dfa_hf.distribute_accelerator(accelerator, build("Llama") if model is None else model, size=size)
    return accelerator


def rates(size: int, schedule: str, multiplied: bool, **more: Any) -> list[float]:
    """The learning rates of a loop, whose script multiplies the steps of its schedule by the processes or does not."""
    accelerator = started(size, gradient_accumulation_steps=ACCUMULATE, **more)
    weight = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    length = STEPS * (accelerator.num_processes if multiplied else 1)
    scheduler = SCHEDULES[schedule](optimizer, length)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    found = []
    for _ in range(STEPS * ACCUMULATE):
        with accelerator.accumulate(weight):
            weight(torch.ones(1)).sum().backward()
            optimizer.step()
            scheduler.step()
            found += scheduler.get_last_lr()
            optimizer.zero_grad()
    resumed = scheduler.state_dict()
    scheduler.load_state_dict(resumed)
    return [*found, float(resumed["last_epoch"])]


def all_rates(size: int) -> dict[Any, list[float]]:
    return {
        (schedule, multiplied, split, linked): rates(
            size, schedule, multiplied, split_batches=split, step_scheduler_with_optimizer=linked
        )
        for schedule in SCHEDULES
        for multiplied in (False, True)
        for split in (False, True)
        for linked in (True, False)
        if (linked or schedule == "warm-up") and not (split and "shorter" in schedule)  # on which accelerate raises
    }


def both(rank: int, world_size: int, size: int) -> tuple[dict[Any, list[float]], dict[str, Any]]:
    """Rates, and what a loop reads and makes of the numbers of accelerate, on the process that is the `group`-th."""
    prepare_worker(rank, world_size)
    every = all_rates(size)
    group, found, accelerator = rank // size, dict[str, Any](), started(size)
    for split in (False, True):
        accelerator.dataloader_config.split_batches = split
        loader = torch.utils.data.DataLoader(range(9), batch_size=2, shuffle=True)
        found[f"batches, split {split}"] = [batch.tolist() for batch in accelerator.prepare(loader)]
        found[f"batches of an epoch, split {split}"] = len(accelerator.prepare(loader))
    accelerator.dataloader_config.split_batches = False
    found["processes"] = accelerator.num_processes
    found["total batch"] = 2 * accelerator.num_processes * accelerator.gradient_accumulation_steps
    found["gather"] = accelerator.gather({"rows": torch.tensor([[group], [7]]), "count": torch.tensor(3 + group)})
    found["gather_for_metrics"] = accelerator.gather_for_metrics(torch.tensor([group]))
    for reduction in ("sum", "mean", "max"):
        given = (torch.tensor(2.0 + group), torch.tensor([3 + group]))
        found[reduction] = accelerator.reduce(given if reduction == "sum" else given[0], reduction)
    found["last"] = accelerator.is_last_process == (rank == world_size - 1)
    return every, found


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (3, 3)])
def test_schedulers_step_once_for_each_group_of_ranks_and_what_a_loop_reads_of_processes_is_of_groups(
    ranks: int, size: int
) -> None:
    wanted = run_ranks(ranks // size, both, 1)
    for rank, (rates, found) in enumerate(run_ranks(ranks, both, size)):
        assert rates == wanted[rank // size][0]
        for name, value in wanted[rank // size][1].items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-6, atol=1e-9, check_dtype=False, msg=f"{name}: {{}}".format
            )


@over_ranks(2)
def test_what_would_differ_between_the_ranks_of_a_group_is_refused(rank: int, ranks: int) -> None:
    from accelerate.utils import set_seed

    prepare_worker(rank, ranks)
    accelerator = started(1)
    accelerator.prepare(torch.utils.data.DataLoader(range(8)))
    with pytest.raises(UnsupportedError, match=r"behind accelerator\.prepare"):
        dfa_hf.distribute_accelerator(accelerator, build("Llama"))
    with pytest.raises(UnsupportedError, match="inductor"):
        started(ranks, dynamo_backend="inductor")
    accelerator = started(ranks, model := build("Llama"))
    with pytest.raises(UnsupportedError, match="split_between_processes"):
        accelerator.split_between_processes([1, 2])
    with pytest.raises(UnsupportedError, match="of objects"):
        accelerator.gather_for_metrics(["a"])
    accelerator.dataloader_config.data_seed = None
    set_seed(3, device_specific=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Sequences(8), batch_size=1, shuffle=True))
    model(**next(iter(loader)))  # which compares the batches of the ranks
