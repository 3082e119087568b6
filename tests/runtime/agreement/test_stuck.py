"""Another rank has failed: a process that is not inside attention goes on, whatever it does; one that is stuck ends."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron import kernels
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime import run
from dfa_megatron.runtime.agreement import watchdog
from dfa_megatron.runtime.agreement.calls import Calls, Kind
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import channel_of
from tests.runtime.agreement.test_watchdog import watch_of_two
from tests.support.arguments import arguments, told
from tests.support.groups import alone
from tests.support.workers import over_ranks, run_ranks

GRACE, BUSY = 0.6, 1.2
"""Seconds that the watchdogs of these tests give, and for which a process is elsewhere."""
BLOCKS = 20


def attend(group: dist.ProcessGroup | None = None) -> None:
    q, k, v = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2))
    dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, schedule="ring", group=group))


def fails(*groups: dist.ProcessGroup | None) -> None:
    """Fail in a call on each group without waiting for its other ranks, as a rank over NCCL may."""

    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory in this test")

    setattr(run, "_recorded", broken)  # noqa: B010
    Channel._meet = lambda self: None  # type: ignore[method-assign]
    for group in groups:
        with pytest.raises((DistAttentionError, torch.OutOfMemoryError)):
            attend(group)


def checkpoint(file: Path) -> None:
    with file.open("w") as out:
        for _ in range(BLOCKS):
            print("block", file=out, flush=True)
            time.sleep(BUSY / BLOCKS)


def debugger() -> None:
    """Stand in one blocking read, as at a prompt."""
    ours, theirs = os.pipe()
    timer = threading.Timer(BUSY, os.write, (theirs, b"c"))
    timer.daemon = True
    timer.start()
    os.read(ours, 1)


def notebook() -> None:
    """Wait for the next cell, as an event loop does."""
    deadline = time.monotonic() + BUSY
    while (left := deadline - time.monotonic()) > 0:
        select.select([], [], [], left)


def evaluation() -> None:
    """Compute, attention over another group included."""
    own, deadline = alone(), time.monotonic() + BUSY
    while time.monotonic() < deadline:
        torch.randn(200, 200).softmax(-1).sum().item()
        attend(own)


@over_ranks(2)
def test_a_process_outside_of_attention_goes_on_and_its_next_call_tells(rank: int, ranks: int, tmp_path: Path) -> None:
    """Rank 0 is elsewhere while the watchdogs of two groups know of rank 1's error; one has a device that waits."""
    watchdog.GRACE = GRACE
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        attend(group)
    if rank == 1:
        fails(*groups)
        time.sleep(4 * BUSY + 2)
        return
    channel_of(groups[1]).calls.pending = lambda: True
    checkpoint(tmp_path / "first")
    for elsewhere in (debugger, notebook, evaluation):
        elsewhere()
    for group in groups:
        text = told(partial(attend, group))
        assert text.startswith("LostGroupError: rank 1 of the group failed in its call "), text
        assert "out of memory in this test" in text
    assert (tmp_path / "first").read_text() == "block\n" * BLOCKS


@over_ranks(2)
def test_a_signal_handler_that_saves_during_a_call_may_end(rank: int, ranks: int, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 inside attention, and is told to save; then rank 1 fails."""
    watchdog.GRACE = GRACE
    attend()
    if rank == 1:
        time.sleep(0.5)
        fails(None)
        time.sleep(BUSY + 1)
        return
    signal.signal(signal.SIGALRM, lambda *_: checkpoint(tmp_path / "saved"))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    assert "out of memory in this test" in told(attend)
    assert (tmp_path / "saved").read_text() == "block\n" * BLOCKS


def _stuck(rank: int, ranks: int, folder: str) -> None:
    """Rank 0 never comes back from a call, and a thread of it saves."""
    watchdog.GRACE = GRACE
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    attend(group)
    if rank == 1:
        fails(group)
        time.sleep(BUSY + GRACE + 3)
        return
    setattr(run, "_recorded", lambda *_: time.sleep(60))  # noqa: B010
    threading.Thread(target=checkpoint, args=(Path(folder, "saved"),)).start()
    Channel._meet = lambda self: None  # type: ignore[method-assign]
    attend(group)


def test_a_process_stuck_in_a_call_is_ended_once_its_other_threads_are_done(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"exit code {watchdog.EXIT_STATUS}"):
        run_ranks(2, _stuck, str(tmp_path), timeout=60)
    assert (tmp_path / "saved").read_text() == "block\n" * BLOCKS


@pytest.mark.parametrize(("ranks", "phase"), [(2, "forward"), (3, "backward")])
@over_ranks()
def test_a_process_busy_inside_a_call_comes_back_to_the_error_of_another_rank(
    rank: int, ranks: int, phase: str
) -> None:
    """The last rank fails in its kernel; that of the others takes longer than the grace, as a first compilation may."""
    watchdog.GRACE = GRACE
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    group, kernel = dist.new_group([*range(ranks)], timeout=timedelta(seconds=40)), type(kernels.get("reference"))
    real = getattr(kernel, phase)

    def slow(*given: object) -> object:
        if rank == ranks - 1:
            raise torch.OutOfMemoryError("out of memory in this test")
        deadline = time.monotonic() + 2 * BUSY
        while time.monotonic() < deadline:
            sum(range(10_000))
        return real(*given)

    setattr(kernel, phase, slow)
    config = arguments(causal=True, schedule="ring", kernel="reference", group=group)
    found = told(lambda: dfa_megatron.dist_flash_attn_func(q, q, q, **config).sum().backward())
    if rank == ranks - 1:
        time.sleep(3 * BUSY)  # it lives on, and so does the store
        assert found.startswith("ExecutionError: ")
    else:
        assert f"rank {ranks - 1} of the group failed in its call " in found, found
        assert "out of memory in this test" in found


def _watched(calls: Calls, action: Callable[[], object]) -> float:
    """The longest time for which a process seemed stuck that does something."""
    watched, done, found = watch_of_two(calls=calls)[0], threading.Event(), [0.0]

    def look() -> None:
        while not done.wait(0.02):
            watched.now = time.monotonic()
            found.append(watched.stuck())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    action()
    done.set()
    thread.join()
    return max(found)


def test_a_wait_for_the_device_is_told_from_what_else_a_process_does_beside_it() -> None:
    calls = Calls()
    calls.begin(Kind.of("forward"))
    calls.end()
    assert _watched(calls, lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)) == 0, "the device is done"
    calls.pending = lambda: True

    def computes() -> None:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            sum(range(1000))
            torch.ones(8).sum()

    assert _watched(calls, lambda: time.sleep(1)) == 0, "it sleeps"
    assert _watched(calls, computes) < 0.5, "it goes on"
    began = time.monotonic()
    waited = _watched(calls, lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000))  # one call that computes
    assert waited > 0.5 * (time.monotonic() - began)
