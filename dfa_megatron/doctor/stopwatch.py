"""Measure time on a device: marks on a stream, and the seconds of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Mark = Any
"""A CUDA event on its stream, or seconds of the host's clock."""


def mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> Mark:
    """Return this point in time on a stream of the device: the current one by default."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream if stream is not None else torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks; wait for the later one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def stopwatch(
    call: Callable[[], object], device: torch.device, *, times: int = 1, behind: bool = False, before: int = 1
) -> float:
    """Return the seconds of a call by the device's clock, the mean of several in a row.

    Args:
        behind: let the device pause until the host has queued all calls, so that only the device's part counts.
        before: calls that are queued first and not counted. With them ranks that wait for one another start together,
            and a rested GPU leaves the clock that it cannot keep; that takes a tenth of a second.
    """
    if behind and device.type == "cuda":
        torch.cuda._sleep(int(2e6) * (before + times))  # clock cycles, about 1 ms a call
        for _ in range(before):
            call()
    start = mark(device)
    for _ in range(times):
        call()
    return seconds_between(start, mark(device)) / times
