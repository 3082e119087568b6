"""What a watchdog makes of heartbeats, and what they cost the store; no time passes, and no thread runs."""

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
from dfa_megatron.runtime.agreement.store import REQUESTS, GroupStore, Waiter
from dfa_megatron.runtime.agreement.watchdog import PERIOD, SILENT, Watchdog, Watched, watch


def watched(
    store: dist.Store, rank: int, members: Sequence[int], calls: Calls | None = None, dead: Sequence[int] = ()
) -> Watched:
    """What the watchdog of a rank knows of a group whose timeout is 8 s."""
    mine = GroupStore(store, "group", rank, members)
    return Watched(mine, calls or Calls(), lambda: True, lambda: None, dead.__contains__, 8.0)


def dog(group: Watched, processes: int = 2) -> Watchdog:
    made = Watchdog(group.store.client, group.store.members[group.store.rank], processes)
    made.watch(group)
    return made


def watch_of_two(calls: Calls | None = None, dead: Sequence[int] = ()) -> tuple[Watched, Watchdog, Watchdog]:
    """Rank 0's view of a group, and the watchdogs of both ranks."""
    store = dist.HashStore()
    mine, other = watched(store, 0, (0, 1), calls, dead), watched(store, 1, (0, 1))
    return mine, dog(mine), dog(other)


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


def test_a_rank_that_runs_no_attention_says_when_its_next_heartbeat_is_due() -> None:
    mine, here, there = watch_of_two()
    for _ in range(2):
        there.tick(60.0)
    there.beat()
    for _ in range(int(100 / PERIOD)):
        here.tick(PERIOD)
        here.beat()
    assert mine.silent() == []
    there._news.clear()
    there.groups[0].calls.begin(Kind.of("forward"))
    there.tick(PERIOD)
    assert there._news.is_set(), "it beats at once"
    assert there.due == PERIOD


def test_a_store_that_stops_answering_is_no_evidence_against_ranks_that_did_not_keep_it() -> None:
    store = dist.HashStore()
    groups = [watched(store, rank, (0, 1, 2)) for rank in range(3)]
    dogs, mine = [dog(group, 3) for group in groups], groups[2]
    for alive in ((0, 1), (0,)):  # rank 1 is about to give its next sign when rank 0, which keeps the store, stops
        for rank in (*alive, 2):
            dogs[rank].beat()
        dogs[2].tick(PERIOD)
    judged = []
    for _ in range(10):
        judged.append(mine.silent())
        dogs[2].tick(PERIOD)
    assert next(ranks for ranks in judged if ranks) == judged[-1] == [0]
    assert "rank 0 of the group gives no sign of life" in mine._text_of(0)
    assert "rank 1 of the group lives" in mine._text_of(1)


@pytest.mark.parametrize("answers", [True, False])
def test_a_process_that_is_gone_has_ended_once_its_last_words_can_have_been_read(answers: bool) -> None:
    mine, here, _ = watch_of_two(dead=[1])
    for _ in range(2):
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


def test_a_rank_that_waits_long_names_one_far_away() -> None:
    store, far = dist.HashStore(), 12
    groups = [watched(store, rank, range(20)) for rank in range(20)]
    dogs, mine = [dog(group, 20) for group in groups], groups[0]
    mine.calls.begin(Kind.of("forward"))
    assert far not in mine.asked()
    for number in range(20):
        for rank, each in enumerate(dogs):
            if rank != far or number < 4:
                each.beat()
        mine.stalled()
        mine.now += PERIOD
    assert mine.silent() == [far]
    assert "rank 12 of the group gives no sign of life" in str(mine.stalled())
    many = watched(store, 0, range(200))
    many.now = SILENT
    turns = [set(many.asked()) for many._looks in range(4)]
    assert (max(map(len, turns)), set().union(*turns)) == (72, set(range(1, 200)))


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


@pytest.mark.parametrize("runs", [True, False], ids=["attention runs", "none runs"])
def test_the_store_of_8192_processes_is_asked_at_most_so_often(runs: bool, record_property: Any) -> None:
    """One process of 8,192 in four groups of 64, over ten minutes: all of them do the same."""
    store, processes, minutes, groups = Counting(), 8192, 10, list[Watched]()
    for name in ("model", "data", "experts", "pipeline"):
        mine = [GroupStore(store.store, name, rank, range(64)) for rank in range(64)][7]
        mine.client = store  # type: ignore[assignment]
        groups.append(Watched(mine, Calls(), lambda: True, lambda: None, lambda _: False, 600.0))
    one = Watchdog(store, 7, processes)  # type: ignore[arg-type]
    one.groups = tuple(groups)
    for _ in range(2):
        one.tick(60.0)
    beats, clock = 0.0, 0.0
    while clock < 60 * minutes:
        if runs:
            groups[0].calls.add(Kind.of("forward"))
        one.tick(PERIOD)
        clock += PERIOD
        if clock >= beats:
            one.beat()
            beats = clock + one.due
    rate = store.asked.total() / (60 * minutes) * processes
    record_property("store", {"attention runs": runs, "requests a second": round(rate)})
    assert set(store.asked) == {"set", "multi_get"}
    assert rate <= (REQUESTS if runs else 300), rate
    assert not any(group.calls.lost for group in groups)


def test_the_thread_that_waits_keeps_nothing_of_a_wait_that_is_over() -> None:
    waiter, message = Waiter(lambda: None), Calls()
    alive = weakref.ref(message)
    waiter.wait(partial(repr, message))
    del message
    assert alive() is None
    waiter.stop()


def test_a_driver_that_is_not_ready_ends_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfa_megatron.runtime import cuda_driver
    from dfa_megatron.runtime.agreement import watchdog

    class Driver:
        asked = 0

        def relax_captures(self) -> bool:
            self.asked += 1
            if self.asked < 3:
                raise RuntimeError("initialization error")
            return True

    late, ticks = Driver(), list[float]()
    monkeypatch.setattr(watchdog, "PERIOD", 0.01)
    monkeypatch.setattr(cuda_driver, "driver", lambda: late)
    _, here, _ = watch_of_two()
    monkeypatch.setattr(here, "tick", ticks.append)
    thread = threading.Thread(target=here._judge)
    thread.start()
    deadline = time.monotonic() + 20
    while len(ticks) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    here._over.set()
    thread.join(20)
    assert len(ticks) >= 6
    assert late.asked == 3
