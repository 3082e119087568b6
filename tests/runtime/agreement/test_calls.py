"""Ranks whose calls part, or that fail in one: every other rank hears of it, at once or at its next call."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron import kernels
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime import run
from dfa_megatron.runtime.agreement import watch
from dfa_megatron.runtime.agreement.calls import Calls, Kind, at_layer
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import channel_of, channels
from tests.support.arguments import arguments, tensors, told
from tests.support.groups import alone
from tests.support.workers import over_ranks, run_ranks

KNOWN = ({"softmax_scale": 0.25}, {"softmax_scale": 0.5}, {"window_size": (3, 0)}, {"causal": False})
"""Plans that all ranks know before their calls part."""


def attend(number: int = 0, *, backward: bool = False, local: int = 8, layer: int = 0, group: Any = None) -> Any:
    """One of the known attentions."""
    with at_layer(layer):
        options = arguments(schedule="ring", group=group, **KNOWN[number])
        out: Any = dfa_megatron.dist_flash_attn_func(*tensors(local), **options)
    if backward:
        out.sum().backward()
    return out


def know(group: Any = None) -> None:
    for number in range(len(KNOWN)):
        attend(number, backward=True, group=group)
    attend(0, local=12, backward=True, group=group)


def _skips(odd: bool, **on: Any) -> None:
    attend(0, layer=1, **on)
    if not odd:
        attend(0, layer=2, **on)
    attend(0, layer=3, **on)


def _repeats(odd: bool, **on: Any) -> None:
    for _ in range(3 if odd else 2):
        attend(1, **on)
    attend(0, **on)


def _swaps(one: int, other: int, odd: bool, **on: Any) -> None:
    for number in (one, other) if odd else (other, one):
        attend(number, backward=True, **on)


def _swaps_lengths(odd: bool, **on: Any) -> None:
    for local in (8, 12) if odd else (12, 8):
        attend(0, local=local, **on)


def _skips_an_equal_call_before_a_backward(odd: bool, **on: Any) -> None:
    sum(attend(0, **on).sum() for _ in range(1 if odd else 2)).backward()  # type: ignore[union-attr]


def _skips_an_equal_backward(odd: bool, **on: Any) -> None:
    outs = [attend(0, **on) for _ in range(2)]
    sum(out.sum() for out in (outs[:1] if odd else outs)).backward()  # type: ignore[union-attr]


FAULTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "skips": (_skips, "layer 2 on rank", "layer 3 on rank"),
    "repeats": (_repeats, "softmax_scale=0.5", "softmax_scale=0.25"),
    "swaps scales": (partial(_swaps, 0, 1), "softmax_scale=0.25", "softmax_scale=0.5"),
    "swaps windows": (partial(_swaps, 0, 2), "window_size=(3, 0)", "forward of q"),
    "swaps masks": (partial(_swaps, 0, 3), "causal=False", "forward of q"),
    "swaps lengths": (_swaps_lengths, "q (1, 8, 4, 16)", "q (1, 12, 4, 16)"),
    "skips an equal call": (_skips_an_equal_call_before_a_backward, "backward of q", "forward of q"),
    "skips an equal backward": (_skips_an_equal_backward, "has come to the end of the backward", "backward of q"),
    "prepares": (
        lambda odd, **on: attend(0, local=16 if odd else 8, **on),
        "prepares an attention that it has not run before",
        "forward of q",
    ),
}


@over_ranks(2, 3, timeout=120)
def test_ranks_whose_calls_part_are_told_which_call_differs(rank: int, ranks: int) -> None:
    for fault, (action, *words) in FAULTS.items() if ranks == 2 else [("swaps scales", FAULTS["swaps scales"])]:
        group = dist.new_group(list(range(ranks)))
        know(group)
        start = time.monotonic()
        text = told(partial(action, rank == ranks - 1, group=group))
        assert time.monotonic() - start < 6
        assert text.startswith(("DisagreementError: ", "LostGroupError: ")), (fault, text)
        assert "run different attentions, after " in text
        assert all(word in text for word in words), (fault, text)
        then = told(partial(attend, 0, group=group))  # a DisagreementError where no call came after the difference
        assert then.startswith(("LostGroupError: ", "DisagreementError: "))
        assert "run different attentions" in then


BREAKS = {"step": ("recv", "send"), "heads": ("alltoall_base",), "call": ("allgather",)}
"""Operations of connections: the messages of a step, an exchange of heads, the comparison of a call."""


class _Breaks:
    """Connections of which one end breaks, as when a process ends: rank 1 ends where it would start an operation.

    nccl: raise NCCL's error in place of gloo's own.
    """

    def __init__(self, backend: object, rank: int, where: str, nccl: bool) -> None:
        self._backend, self._rank, self._breaks, self._nccl = backend, rank, BREAKS[where], nccl

    def __getattr__(self, name: str) -> Any:
        start = getattr(self._backend, name)
        return partial(self._start, start) if name in self._breaks else start

    def _start(self, start: Callable[..., object], *args: object) -> object:
        if self._rank == 1:
            os._exit(0)
        if self._nccl:
            raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
        time.sleep(0.5)  # until gloo has noticed, and refuses at once
        return start(*args)


def _connection_breaks(rank: int, ranks: int, where: str, nccl: bool, report: str) -> None:
    options = arguments(causal=True, softmax_scale=0.25, schedule="ring", ulysses_degree=2 if where == "heads" else 1)
    dfa_megatron.dist_flash_attn_func(*tensors(), **options)
    for made in channel_of(None)._made.values():
        made._group, made._backend = (_Breaks(each, rank, where, nccl) for each in (made._group, made._backend))
    Path(report).write_text(told(lambda: dfa_megatron.dist_flash_attn_func(*tensors(), **options)))
    os._exit(0)


@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("where", [*BREAKS])
def test_a_rank_whose_connection_breaks_in_the_midst_of_a_call_is_named(tmp_path: Path, where: str, nccl: bool) -> None:
    report = tmp_path / "report"
    with pytest.raises(AssertionError):  # no rank answers the test
        run_ranks(2, _connection_breaks, where, nccl, str(report), timeout=40)
    told = report.read_text()
    assert told.startswith("ExecutionError: " if where == "step" else "AbsentError: "), told
    assert "rank 1 of the group has ended" in told
    assert ("remote process exited" if nccl else "by peer") in told


@pytest.mark.parametrize("absent", [0, 2])
@over_ranks(3, timeout=40)
def test_whoever_is_absent_at_the_first_attention_is_named_by_every_other_rank(
    rank: int, ranks: int, absent: int
) -> None:
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=4))
    if rank == absent:
        time.sleep(2.5)
        return
    start = time.monotonic()
    text = told(lambda: dfa_megatron.dist_flash_attn_func(*tensors(), causal=True, group=group))
    assert time.monotonic() - start < 2.5
    assert text.startswith("AbsentError: ")
    assert f"rank {absent} of the group did not come within 1 s" in text


@over_ranks(2)
def test_a_fork_may_not_call_attention_and_its_parent_goes_on(rank: int, ranks: int) -> None:
    """Forks that call attention too, with a lock of ours held."""
    attend()
    (mine,) = watch._watches
    for lock in (mine._woken._cond, mine._turn, watch._LOCK, channel_of(None)._closing):
        with lock:
            if (pid := os.fork()) == 0:
                signal.alarm(3)
                text = told(attend)
                os._exit(not text.startswith("UnsupportedError: ") or "in a fork" not in text)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "refused by name"
    attend()


@over_ranks(2)
def test_threads_that_each_rank_numbers_for_itself_are_no_difference(rank: int, ranks: int) -> None:
    """Rank 1 makes more of them, as a logger does."""
    found: list[str] = []
    for _ in range(1 + rank):
        pool, thread = ThreadPoolExecutor(1), threading.Thread(target=lambda: found.append(told(know)))
    thread.start()
    thread.join()
    with pool:
        found.append(pool.submit(told, partial(know, dist.new_group([0, 1]))).result())
    assert found == ["", ""]


@over_ranks(2)
def test_an_exception_of_any_kind_in_preparation_is_told_to_the_other_ranks(rank: int, ranks: int) -> None:
    if rank == 1:
        with (
            patch("dfa_megatron.runtime.request.of_window", side_effect=ValueError("an impossible window")),
            pytest.raises(ValueError, match="an impossible window"),
        ):
            dfa_megatron.dist_flash_attn_func(*tensors(), causal=True)
        return
    start = time.monotonic()
    text = told(lambda: dfa_megatron.dist_flash_attn_func(*tensors(), causal=True))
    assert time.monotonic() - start < 5
    assert text.startswith("DisagreementError: ")
    assert "rank 1 of the group refuses this attention: ValueError: an impossible window" in text


@pytest.mark.parametrize(("ranks", "strays"), [(2, [0]), (3, [0, 2]), (2, [0, 1])])
@over_ranks()
def test_calls_of_other_threads_are_refused_by_their_names_and_the_group_goes_on(
    rank: int, ranks: int, strays: list[int]
) -> None:
    """Other threads of some ranks call: a known attention, a new one, a backward, and one while the first calls."""
    know()
    found: list[str] = []
    graph = attend(0, backward=False)
    calls = (lambda: attend(0), lambda: attend(0, local=20), lambda: graph.sum().backward(), lambda: attend(1))
    pool = [threading.Thread(target=lambda c=c: found.append(told(c)), name=f"second {n}") for n, c in enumerate(calls)]
    for thread in pool[:3] if rank in strays else ():
        thread.start()
        thread.join(20)
    with channel_of(None).calls.preparing():
        for thread in pool[3:] if rank in strays else ():
            thread.start()
            thread.join(20)
    assert len(found) == 4 * (rank in strays), "no thread waits"
    assert all(text.startswith("UnsupportedError: ") for text in found)
    assert all("from two threads, 'MainThread' and 'second " in text for text in found)
    assert told(lambda: attend(2, backward=True)) == ""


@over_ranks(2)
def test_a_destroyed_group_leaves_nothing_behind(rank: int, ranks: int) -> None:
    from dfa_megatron.runtime.prepare import in_use

    def settled() -> tuple[int, int]:
        """Descriptors and threads once no channel is left, or after five seconds."""
        deadline = time.monotonic() + 5
        while (channels() or in_use()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once(shape: int) -> None:
        group = dist.new_group(list(range(ranks)))
        for options in ({}, {"ulysses_degree": 2}):
            out = dfa_megatron.dist_flash_attn_func(*tensors(shape), **arguments(group=group, **options))  # type: ignore[arg-type]
            out.sum().backward()  # type: ignore[union-attr]
        dist.barrier(group)
        dist.destroy_process_group(group)

    once(8)  # what is made once for a process stays
    before = settled()
    for shape in (10, 12):
        once(shape)
    assert (settled(), in_use()) == (before, ())


def test_chains_differ_for_ever_once_calls_have_differed() -> None:
    one, other = Calls(), Calls()
    for number in range(20):
        mine, theirs = one.add(Kind.of("same")), other.add(Kind.of("other" if number == 7 else "same"))
        assert (mine.chain == theirs.chain) == (number < 7)
    assert one.at(8) is not None
    assert [text for _, text, _ in json.loads(one.shown())[-2:]] == ["same", "same"]


BUSY = 1.2
"""Seconds for which a process is elsewhere."""
BLOCKS = 20


def fails_alone(*groups: dist.ProcessGroup | None) -> None:
    """Fail in a call on each group without waiting for its other ranks, as a rank over NCCL may."""

    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory in this test")

    setattr(run, "_run_or_replay", broken)  # noqa: B010
    Channel._meet = lambda self: []  # type: ignore[method-assign]
    for group in groups:
        with pytest.raises((DistAttentionError, torch.OutOfMemoryError)):
            attend(group=group)


def checkpoint(file: Path) -> None:
    with file.open("w") as out:
        for _ in range(BLOCKS):
            print("block", file=out, flush=True)
            time.sleep(BUSY / BLOCKS)


def evaluation() -> None:
    """Compute, attention over another group included."""
    own, deadline = alone(), time.monotonic() + BUSY
    while time.monotonic() < deadline:
        torch.randn(200, 200).softmax(-1).sum().item()
        attend(group=own)


@over_ranks(2)
def test_a_process_outside_of_attention_goes_on_and_its_next_call_tells(rank: int, ranks: int, tmp_path: Path) -> None:
    """Rank 0 is elsewhere while the watch of two groups knows of rank 1's error; one has a device that waits."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        attend(group=group)
    if rank == 1:
        fails_alone(*groups)
        time.sleep(4 * BUSY + 2)
        return
    channel_of(groups[1]).calls.pending = lambda: True
    checkpoint(tmp_path / "first")
    evaluation()
    for group in groups:
        text = told(partial(attend, group=group))
        assert text.startswith("LostGroupError: rank 1 of the group failed in its call "), text
        assert "out of memory in this test" in text
    assert (tmp_path / "first").read_text() == "block\n" * BLOCKS


@pytest.mark.parametrize(("ranks", "phase"), [(2, "forward"), (3, "backward")])
@over_ranks()
def test_a_process_busy_inside_a_call_comes_back_to_the_error_of_another_rank(
    rank: int, ranks: int, phase: str
) -> None:
    """The last rank fails in its kernel; that of the others takes long, as a first compilation may."""
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
