"""What the watch makes of heartbeats, and what they cost the store; no time passes, and no thread runs."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from dfa_megatron.errors import DisagreementError, DistAttentionError
from dfa_megatron.runtime.agreement.calls import Calls, Kind
from dfa_megatron.runtime.agreement.store import MARGIN, REQUESTS, GroupStore, Waiter
from dfa_megatron.runtime.agreement.watch import BESIDE, PERIOD, Watch, Watched, watch

SILENT = 2 * PERIOD + MARGIN


def watched(
    store: dist.Store, rank: int, members: Sequence[int], calls: Calls | None = None, dead: Sequence[int] = (),
    timeout: float = 8.0,
) -> Watched:  # fmt: skip
    """What the watch of a rank knows of a group."""
    mine, gone = GroupStore(store, "group", rank, members), dead.__contains__
    return Watched(mine, calls or Calls(), lambda: True, lambda: None, gone, lambda know: not know, timeout)


def process_of(group: Watched, processes: int = 2) -> Watch:
    made = Watch(group.store.client, group.store.members[group.store.rank], processes)
    made.watch(group)
    return made


def watch_of_two(calls: Calls | None = None, dead: Sequence[int] = ()) -> tuple[Watched, Watch, Watch]:
    """Rank 0's view of a group, and the watches of both ranks."""
    store = dist.HashStore()
    mine, other = watched(store, 0, (0, 1), calls, dead), watched(store, 1, (0, 1))
    return mine, process_of(mine), process_of(other)


@pytest.mark.parametrize("pause", [SILENT - 0.2, SILENT + 0.2, 60.0], ids=lambda pause: f"{pause:g} s")
def test_a_machine_that_stood_still_makes_no_rank_silent(pause: float) -> None:
    mine, here, there = watch_of_two()
    there.beat()
    here.beat()
    here.tick(PERIOD)  # the clock has stood still, however long the pause
    here.beat()  # before the other rank runs again
    assert mine.silent() == []
    there.beat()
    here.beat()
    assert mine.silent() == []


def test_a_rank_without_heartbeats_in_all_the_time_that_this_one_ran_is_silent() -> None:
    mine, here, there = watch_of_two()
    there.beat()
    here.beat()
    while mine.now <= SILENT:
        assert mine.silent() == []
        here.tick(PERIOD)
        here.beat()
    assert mine.silent() == [1]
    assert "rank 1 of the group gives no sign of life" in mine._text_of(1)


def test_a_store_that_stops_answering_is_no_evidence_against_ranks_that_did_not_keep_it() -> None:
    store = dist.HashStore()
    groups = [watched(store, rank, (0, 1, 2)) for rank in range(3)]
    watches, mine = [process_of(group, 3) for group in groups], groups[2]
    for alive in ((0, 1), (0,)):  # rank 1 is about to give its next sign when rank 0, which keeps the store, stops
        for rank in (*alive, 2):
            watches[rank].beat()
        watches[2].tick(PERIOD)
    judged = []
    for _ in range(10):
        judged.append(mine.silent())
        watches[2].tick(PERIOD)
    assert next(ranks for ranks in judged if ranks) == judged[-1] == [0]
    assert "rank 0 of the group gives no sign of life" in mine._text_of(0)
    assert "rank 1 of the group lives" in mine._text_of(1)


@pytest.mark.parametrize("answers", [True, False])
def test_a_process_that_is_gone_has_ended_once_its_last_words_can_have_been_read(answers: bool) -> None:
    mine, here, _ = watch_of_two(dead=[1])
    for _ in range(1 if answers else 2):
        assert not mine.ended(1)
        here.tick(SILENT - 0.1)
        if answers:
            here.beat()
    assert mine.ended(1)


def test_the_reason_of_a_rank_that_ends_is_told_though_it_is_read_in_the_midst_of_judging() -> None:
    mine, here, there = watch_of_two()
    mine.calls.doing = "waits"
    for _ in range(8):
        there.beat()
        here.beat()
        mine.stalled()
        mine.now += PERIOD
    stalled = mine.stalled

    def last_words_come_first() -> DistAttentionError | None:
        there.groups[0].calls.lose(RuntimeError("rank 2 gives no sign of life"), told=True)
        there.leave(there.groups[0])
        here.beat()
        return stalled()

    mine.stalled = last_words_come_first  # type: ignore[method-assign]
    told = str(mine.judge())
    assert told == "rank 1 of the group failed in its call 0: RuntimeError: rank 2 gives no sign of life"
    assert mine.ended(1)


def test_a_process_leaves_its_last_words_and_stays_until_they_can_have_been_read() -> None:
    mine, here, there = watch_of_two()
    before = time.monotonic()
    there.leave(there.groups[0])
    assert time.monotonic() - before < PERIOD, "nobody waits if there is nothing to tell"
    mine.calls.lose(RuntimeError("an accident"), told=True)
    here.leave(mine)
    assert time.monotonic() - before > 2 * PERIOD, "the store ends with this process"


def test_a_rank_names_one_far_away_and_reads_at_most_so_many() -> None:
    store, far = dist.HashStore(), 12
    groups = [watched(store, rank, range(20)) for rank in range(20)]
    watches, mine = [process_of(group, 20) for group in groups], groups[0]
    mine.calls.begin(Kind.of("forward"))
    for number in range(20):
        for rank, each in enumerate(watches):
            if rank != far or number < 4:
                each.beat()
        mine.stalled()
        mine.now += PERIOD
    assert mine.silent() == [far]
    assert "rank 12 of the group gives no sign of life" in str(mine.stalled())
    assert len(watched(store, 0, range(200)).beside) == BESIDE


def test_a_lost_group_is_unblocked_once_every_rank_knows_or_cannot_know() -> None:
    store = dist.HashStore()
    groups = [watched(store, rank, (0, 1, 2)) for rank in range(3)]
    watches, asked = [process_of(group, 3) for group in groups], list[bool]()
    groups[0].unblock = lambda know: asked.append(know) is None
    for each in watches:
        each.beat()
    groups[0].calls.lose(RuntimeError("an accident"), told=True)
    for tick in range(20):
        for rank in (0, 1) if tick >= 2 else (0,):  # rank 2 has stopped, and rank 1 hears late
            watches[rank].beat()
            watches[rank].tick(PERIOD)
    assert "an accident" in str(groups[1].calls.lost)
    assert asked[:5] == [False] * 5
    assert asked[-1], "rank 1 says that it knows, and rank 2 is silent"
    assert asked == sorted(asked)


def test_a_device_that_fails_loses_the_group_and_not_the_watch() -> None:
    def broken() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    mine, here, there = watch_of_two()
    mine.calls.pending, mine.unblock = broken, lambda know: broken()
    for _ in range(3):
        here.tick(PERIOD)
        here.beat()
    there.beat()
    there.tick(PERIOD)
    told = str(there.groups[0].calls.lost)
    assert told.startswith("rank 0 of the group failed in its call 0: its device has failed: CUDA error"), told


def test_a_table_that_comes_slowly_holds_up_no_other_group() -> None:
    mine, here, _ = watch_of_two()
    comes, mine.lost = threading.Event(), "calls differ"
    mine.difference = lambda: comes.wait(20) and DisagreementError("a table")  # type: ignore[assignment,method-assign]
    here.tick(PERIOD)
    (thread,) = (each for each in threading.enumerate() if each.name.endswith("shows calls"))
    comes.set()
    thread.join(20)
    assert str(mine.calls.lost) == "a table"


def test_every_rank_of_many_gets_the_whole_table_though_few_see_the_difference() -> None:
    store = dist.HashStore()
    groups = [watched(dist.PrefixStore("", store), rank, range(20)) for rank in range(20)]
    try:
        for rank, group in enumerate(groups):
            group.calls.add(Kind.of("backward" if rank == 12 else "forward"))
            watch(group, rank, 20)
        deadline = time.monotonic() + 20
        while any(group.calls.lost is None for group in groups) and time.monotonic() < deadline:
            time.sleep(0.05)
        for group in groups:
            assert "call 1: forward on ranks 0, 1, ... (19 of them); backward on rank 12" in str(group.calls.lost)
    finally:
        for group in groups[1:]:  # rank 0 would wait: it keeps the store
            group.leave()
        groups[0].calls.lost = None
        groups[0].leave()


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.asked[name] += 1
        found: Callable[..., Any] = getattr(self.store, name)
        return found


def test_the_store_of_8192_processes_is_asked_at_most_so_often(record_property: Any) -> None:
    """One process of 8,192 in four groups of 64: all of them do the same."""
    store, processes, groups = Counting(), 8192, list[Watched]()
    for name in ("model", "data", "experts", "pipeline"):
        mine = [GroupStore(store.store, name, rank, range(64)) for rank in range(64)][7]
        mine.client = store  # type: ignore[assignment]
        groups.append(Watched(mine, Calls(), lambda: True, lambda: None, lambda _: False, lambda _: False, 600.0))
    one = Watch(store, 7, processes)  # type: ignore[arg-type]
    one.groups = tuple(groups)
    for _ in range(100):
        groups[0].calls.add(Kind.of("forward"))
        one.beat()
        one.tick(one.period)
    rate = store.asked.total() / (100 * one.period) * processes
    record_property("store", {"requests a second": round(rate)})
    assert set(store.asked) == {"set", "multi_get"}
    assert rate <= REQUESTS
    assert not any(group.calls.lost for group in groups)


def test_the_thread_that_waits_keeps_nothing_of_a_wait_that_is_over() -> None:
    waiter, message = Waiter(lambda: None), Calls()
    alive = weakref.ref(message)
    waiter.wait(partial(repr, message))
    del message
    assert alive() is None
    waiter.stop()


def test_a_driver_that_is_not_ready_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfa_megatron.runtime import cuda_driver
    from dfa_megatron.runtime.agreement import watch as module

    class Driver:
        asked = 0

        def relax_captures(self) -> bool:
            self.asked += 1
            if self.asked < 3:
                raise RuntimeError("initialization error")
            return True

    late, ticks = Driver(), list[float]()
    monkeypatch.setattr(module, "PERIOD", 0.01)
    monkeypatch.setattr(cuda_driver, "driver", lambda: late)
    _, here, _ = watch_of_two()
    here.period = 0.01
    monkeypatch.setattr(here, "tick", ticks.append)
    here.thread.start()
    deadline = time.monotonic() + 20
    while len(ticks) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    here.groups = ()
    here.thread.join(20)
    assert len(ticks) >= 6
    assert late.asked == 3
