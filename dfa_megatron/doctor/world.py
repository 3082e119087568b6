"""Join the ranks of a benchmark, and run an action on all so that every rank learns of a failure on one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from dfa_megatron.errors import DisagreementError, DistAttentionError, UnsupportedError
from dfa_megatron.runtime.agreement.agree import exchange
from dfa_megatron.runtime.agreement.board import Board
from dfa_megatron.runtime.comm.groups import group_name
from dfa_megatron.runtime.comm.registry import renew

T = TypeVar("T")

OUT_OF_MEMORY = "out of memory"
REFUSED = "refused"
FAILED = "failed"
PATIENCE = 300.0
"""Seconds that a rank waits for another: some kernels compile at their first call."""
_FAILED_PATIENCE = 60.0
"""Seconds to wait after a failure: a rank that does not arrive by then is blocked by it."""
_IDLE_PATIENCE = 20.0
_LONGEST = 300
"""Characters of a reason."""


class StuckError(DistAttentionError, RuntimeError):
    """After a failure some rank still waits for a message that will not come; nothing more can be run."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of the first rank on which one happened; `state` is one of the three above."""

    state: str
    why: str


@dataclass(frozen=True)
class World:
    """The default group, and a gloo group beside it on which the host may wait whatever the device does."""

    rank: int
    size: int
    device: torch.device
    side: dist.ProcessGroup

    @cached_property
    def board(self) -> Board:
        """Return the group on which ranks report failures."""
        return Board.of_group(self.side)

    @property
    def cuda(self) -> bool:
        """Return whether tensors are on GPUs."""
        return self.device.type == "cuda"

    def sums(self, values: Iterable[float]) -> list[float]:
        """Return the sum over the ranks of each value."""
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self.side)
        return [float(value) for value in total]

    def slowest(self, values: Iterable[float]) -> list[float]:
        """Return the largest over the ranks of each value."""
        return slowest(values, self.side)

    def from_first(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        told = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(told, 0, group=self.side)
        return float(told)

    def leave(self) -> None:
        """End the process groups once every rank is here; an earlier end would tear down connections still in use."""
        dist.barrier(group=self.side)
        dist.destroy_process_group()


def slowest(values: Iterable[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the largest of each value over the ranks of a group that takes CPU tensors; collective."""
    largest = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in largest]


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


def together(world: World, action: Callable[[], T]) -> T | Failure:
    """Run an action on every rank; return its result if it succeeded on all, else the failure.

    The action should leave waiting for the device to the caller, because a rank that waits in it cannot learn of a
    failure.

    Raises:
        StuckError: ranks failed at different places, and one still waits for a message from another.
    """
    value, mine = None, Failure("", "")
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 -- other people's packages raise anything, and a row says what
        mine = _failure(error)
    patience = _FAILED_PATIENCE if mine.state else PATIENCE
    everyone = _told(world, {"state": mine.state, "why": mine.why}, patience)
    failures = [(rank, facts) for rank, facts in enumerate(everyone) if facts["state"]]
    if not failures:
        return cast(T, value)
    rank, facts = failures[0]
    idle = _idle(world, len(failures))
    if any(facts["busy"] for facts in _told(world, {"busy": "" if idle else "yes"})):
        raise StuckError(f"rank {rank} failed ({facts['why']}) and another waits for its messages")
    renew(group_name(None))  # an attention that failed has lost the group
    if world.cuda:
        torch.cuda.empty_cache()
    return Failure(facts["state"], facts["why"])


def _failure(error: Exception) -> Failure:
    """Summarize an exception for a row: its first line, and whether memory ran out."""
    if isinstance(error, UnsupportedError):
        return Failure(REFUSED, f"{error.what}: {error.why}" if error.why else str(error))
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:_LONGEST]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or "out of memory" in str(cause).lower():
            return Failure(OUT_OF_MEMORY, text)
        cause = cause.__cause__
    return Failure(FAILED, f"{type(error).__name__}: {text}")


def _told(world: World, facts: dict[str, str], patience: float = PATIENCE) -> list[dict[str, str]]:
    """Return the facts of every rank, in rank order."""
    try:
        return exchange(facts, world.board, patience)
    except DisagreementError as error:
        why = facts.get("why") or "this rank did not fail"
        raise StuckError(f"not every rank came back within {patience:g} s ({why})") from error


def _idle(world: World, failed: int) -> bool:
    """Return whether this rank is idle after a failure. On a CPU it is idle if every rank has failed."""
    if not world.cuda:
        return failed == world.size
    waiter = threading.Thread(target=torch.cuda.synchronize, args=(world.device,), daemon=True)
    waiter.start()
    waiter.join(_IDLE_PATIENCE)
    return not waiter.is_alive()
