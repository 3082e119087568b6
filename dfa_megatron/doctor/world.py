"""Join the ranks of a measurement, time calls on a device, and reduce figures over the ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError

PATIENCE = 300.0
"""Seconds that a rank waits for another: some kernels compile at their first call."""


@dataclass(frozen=True)
class World:
    """The default group, and a gloo group beside it on which the host may wait whatever the device does."""

    rank: int
    size: int
    device: torch.device
    side: dist.ProcessGroup

    @property
    def cuda(self) -> bool:
        """Return whether tensors are on GPUs."""
        return self.device.type == "cuda"

    def sums(self, values: Iterable[float]) -> list[float]:
        """Return the sum over the ranks of each value."""
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self.side)
        return total.tolist()

    def slowest(self, values: Iterable[float]) -> list[float]:
        """Return the largest over the ranks of each value."""
        return slowest(values, self.side)

    def leave(self) -> None:
        """End the process groups once every rank is here; an earlier end would tear down connections still in use."""
        dist.barrier(group=self.side)
        dist.destroy_process_group()


def slowest(values: Iterable[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the largest of each value over the ranks of a group that takes CPU tensors; collective."""
    largest = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def own_device(kind: str = "auto") -> torch.device:
    """Return this rank's device and make it the current one; "auto" is a GPU where there is one.

    Raises:
        UnsupportedError: the rank has no GPU of its own.
    """
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UnsupportedError(
                f"local rank {local}", f"this machine has {torch.cuda.device_count()} GPUs", "one rank per GPU"
            )
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def join(device: str = "auto", patience: float = PATIENCE) -> World:
    """Join the ranks that torchrun, or another launcher with its environment variables, has started.

    Args:
        device: "cuda", "cpu", or "auto" for GPUs if there are some.
        patience: seconds that a collective waits for the other ranks.

    Raises:
        UnsupportedError: a rank has no GPU of its own.
    """
    where, limit = own_device(device), timedelta(seconds=patience)
    if not dist.is_initialized():
        backend, own = ("cpu:gloo,cuda:nccl", where) if where.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=own, timeout=limit)
    side = dist.new_group(backend="gloo", timeout=limit)
    world = World(dist.get_rank(), dist.get_world_size(), where, side)
    dist.all_reduce(torch.zeros(1, device=where))  # communicators are made before anything is measured
    return world


Mark = Any
"""A CUDA event on its stream, or seconds of the host's clock."""


def mark(device: torch.device) -> Mark:
    """Return this point in time on the device's current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks; wait for the later one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def stopwatch(call: Callable[[], object], device: torch.device, *, times: int = 1, behind: bool = False) -> float:
    """Return the seconds of a call by the device's clock, the mean of several in a row.

    Args:
        behind: let the device pause until the host has queued all calls, so that only the device's part counts. One
            call before them is not counted: with it ranks that wait for one another start together.
    """
    if behind and device.type == "cuda":
        torch.cuda._sleep(int(2e6) * (1 + times))  # clock cycles, about 1 ms a call
        call()
    start = mark(device)
    for _ in range(times):
        call()
    return seconds_between(start, mark(device)) / times
