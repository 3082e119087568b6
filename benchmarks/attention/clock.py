"""Timing: methods take turns, ranks start together, and a time is that of the slowest rank."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.attention.failures import StuckError
from dfa_megatron.doctor.world import World, mark, seconds_between

logger = logging.getLogger(__name__)

LONG = 1.0
"""Seconds from which on a call is repeated three times at least, whatever --repetitions says."""
_MOST = 50


@dataclass(slots=True)
class Timer:
    """One pass of one method: the call, and the milliseconds of each repetition, on this rank until `slowest`."""

    run: Callable[[], object]
    repetitions: int
    milliseconds: list[float] = field(default_factory=list)
    """From the start, at the same time on every rank, until the device has done it."""
    host: list[float] = field(default_factory=list)
    """Until the call has returned to Python."""

    @property
    def median(self) -> float:
        """Return the median in milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def host_median(self) -> float:
        """Return the median in milliseconds."""
        return statistics.median(self.host)


def once(world: World, run: Callable[[], object]) -> tuple[float, float]:
    """Return (milliseconds, host milliseconds) of one call that all ranks start together.

    Raises:
        StuckError: an earlier call failed on a rank; the others may wait for it on their devices.
    """
    failed = 0.0
    if world.size > 1:
        dist.barrier(None if world.cuda else world.side)
    if world.cuda:
        torch.cuda.synchronize()
    start = mark(world.device)
    begin = time.perf_counter()
    try:
        run()
    except Exception:  # whatever it is, the others have to hear of it before they wait for their devices
        logger.exception("a repetition failed")
        failed = 1.0
    host = 1e3 * (time.perf_counter() - begin)
    end = mark(world.device)
    if world.slowest([failed])[0]:
        raise StuckError("a repetition failed after the same call had gone well")
    return 1e3 * seconds_between(start, end), host


def repetitions(milliseconds: float, least: int, seconds: float) -> int:
    """Return how often to repeat a call: until `seconds` are spent, and at least `least` times."""
    if milliseconds > 1e3 * LONG:
        least = min(least, 3)
    return max(least, min(_MOST, math.ceil(1e3 * seconds / milliseconds)))


def take_turns(world: World, timers: Sequence[Timer]) -> None:
    """Fill the timers, one repetition of each in turn, so that a slow moment of the machine hits all of them."""
    for turn in range(max((timer.repetitions for timer in timers), default=0)):
        for timer in timers:
            if turn < timer.repetitions:
                milliseconds, host = once(world, timer.run)
                timer.milliseconds.append(milliseconds)
                timer.host.append(host)
    for timer in timers:
        timer.milliseconds = world.slowest(timer.milliseconds)
        timer.host = world.slowest(timer.host)


class Memory:
    """Bytes of this rank's device since it was made; 0 on a CPU, where nobody counts them.

    peak: most that PyTorch's allocator held at once, beside what was there before.
    outside: what was taken past PyTorch's allocator and kept: communicators, symmetric memory, libraries' workspaces.
    """

    def __init__(self, world: World) -> None:
        self.peak = self.outside = 0
        self._cuda = world.cuda
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before, self._outside = torch.cuda.memory_allocated(), _outside()

    def read(self) -> None:
        """Wait for the device and read the counters."""
        if self._cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self._before
            self.outside = max(0, _outside() - self._outside)


def _outside() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
