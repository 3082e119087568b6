"""Whatever accelerate counts or scales by processes is, where ranks share sequences, that of one process a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.test_trainer import Sequences, prepare_worker
from tests.support.models import build
from tests.support.workers import run_ranks

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


def all_rates(rank: int, world_size: int, size: int) -> dict[Any, list[float]]:
    prepare_worker(rank, world_size)
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


def counts(rank: int, world_size: int, size: int) -> dict[str, Any]:
    """What a loop reads and makes of the numbers of accelerate, on the process that is the `group`-th of the groups."""
    prepare_worker(rank, world_size)
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
    return found


def both(rank: int, world_size: int, size: int) -> tuple[dict[Any, list[float]], dict[str, Any]]:
    return all_rates(rank, world_size, size), counts(rank, world_size, size)


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


def refused(rank: int, world_size: int) -> None:
    from accelerate.utils import set_seed

    prepare_worker(rank, world_size)
    accelerator = started(1)
    accelerator.prepare(torch.utils.data.DataLoader(range(8)))
    with pytest.raises(UnsupportedError, match=r"behind accelerator\.prepare"):
        dfa_hf.distribute_accelerator(accelerator, build("Llama"))
    with pytest.raises(UnsupportedError, match="inductor"):
        started(world_size, dynamo_backend="inductor")
    accelerator = started(world_size, model := build("Llama"))
    with pytest.raises(UnsupportedError, match="split_between_processes"):
        accelerator.split_between_processes([1, 2])
    with pytest.raises(UnsupportedError, match="of objects"):
        accelerator.gather_for_metrics(["a"])
    accelerator.dataloader_config.data_seed = None
    set_seed(3, device_specific=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Sequences(8), batch_size=1, shuffle=True))
    model(**next(iter(loader)))  # which compares the batches of the ranks


def test_what_would_differ_between_the_ranks_of_a_group_is_refused() -> None:
    run_ranks(2, refused)
