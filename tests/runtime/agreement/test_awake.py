"""A rank that did not run itself does not call the others silent; a thread that waited keeps nothing."""

from __future__ import annotations

import time as clock
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime.agreement import awake, watcher
from dfa_megatron.runtime.agreement.board import Board
from dfa_megatron.runtime.agreement.calls import Calls
from dfa_megatron.runtime.agreement.waiter import Waiter
from dfa_megatron.runtime.agreement.watcher import LINGER, PERIOD, SILENT, Watch


class Time:
    """What the clock reads instead of the machine's time."""

    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(awake, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def watch_of_two(dead: list[int]) -> tuple[Watch, Board]:
    """The watch of rank 0, whose threads the test plays, and the board of rank 1."""
    store = dist.HashStore()
    mine, other = Board(store, 0, (0, 1)), Board(store, 1, (0, 1))
    watch = Watch(mine, Calls(), lambda: True, lambda: None, dead.__contains__, 2.0, 600.0)
    return watch, other


def lives(board: Board, beat: int) -> None:
    board.put("sign", watcher.json.dumps(watcher.Sign(beat, 0, 0, "", "")))


def test_time_in_which_nobody_ticked_counts_little(time: Time) -> None:
    clock = awake.AwakeClock(1.0)
    for _ in range(4):
        time.seconds += 0.5
        clock.tick()
    assert clock.now() == 2.0
    time.seconds += 60.0
    assert clock.now() == 3.0
    clock.tick()
    assert clock.now() == 3.0
    time.seconds += 0.25
    assert clock.now() == 3.25


@pytest.mark.parametrize("pause", [SILENT - 0.2, SILENT + 0.2, 60.0], ids=lambda pause: f"{pause:g} s")
def test_a_machine_that_stood_still_makes_no_rank_silent(time: Time, pause: float) -> None:
    watch, other = watch_of_two([])
    lives(other, 1)
    watch.look()
    time.seconds += 0.9 * PERIOD
    time.seconds += pause
    watch._clock.tick()
    watch.look()  # before the other rank runs again
    assert watch.silent() == []
    lives(other, 2)
    watch.look()
    assert watch.silent() == []


def test_a_rank_without_signs_in_all_the_time_that_this_one_ran_is_silent(time: Time) -> None:
    watch, other = watch_of_two([])
    lives(other, 1)
    seconds = 0.0
    while seconds <= SILENT:
        assert watch.silent() == []
        watch.look()
        seconds += PERIOD
        time.seconds += PERIOD
        watch._clock.tick()
    watch.look()
    assert watch.silent() == [1]


def test_a_store_that_stops_answering_is_no_evidence_against_ranks_that_did_not_keep_it(time: Time) -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, (0, 1, 2)) for rank in range(3)]
    watch = Watch(boards[2], Calls(), lambda: True, lambda: None, [].__contains__, 2.0, 600.0)
    for seen in ((0, 1), (0,)):  # rank 1 is about to give its next sign when rank 0, which keeps the store, stops
        for rank in seen:
            lives(boards[rank], int(time.seconds * 10))
        watch.look()
        time.seconds += PERIOD
        watch._clock.tick()
    judged = []
    for _ in range(10):
        judged.append(watch.silent())
        time.seconds += PERIOD
        watch._clock.tick()
    assert next(ranks for ranks in judged if ranks) == judged[-1] == [0]
    assert "rank 0 of the group gives no sign of life" in watch._state(0)
    assert "rank 1 of the group lives" in watch._state(1)


def test_a_process_that_is_gone_counts_as_ended_once_a_later_look_is_over(time: Time) -> None:
    watch, _ = watch_of_two([1])
    for _ in range(2):
        assert not watch._ended(1)
        time.seconds += SILENT - 0.1  # a slow store
        watch._clock.tick()
        watch.look()
    assert watch._ended(1)


def test_a_process_that_is_gone_counts_as_ended_where_the_store_went_with_it(time: Time) -> None:
    watch, _ = watch_of_two([1])
    assert not watch._ended(1)
    for _ in range(8):
        time.seconds += PERIOD
        watch._clock.tick()
    assert watch._ended(1)


def test_the_reason_of_a_rank_that_ends_is_told_though_it_is_read_in_the_midst_of_judging(time: Time) -> None:
    watch, other = watch_of_two([])
    lives(other, 1)
    watch.look()
    watch.calls.doing = "waits"
    watch.stalled()
    for _ in range(8):
        lives(other, int(time.seconds * 10))
        watch.look()
        time.seconds += PERIOD
        watch._clock.tick()
    stalled = watch.stalled

    def sign_arrives_first() -> DistAttentionError | None:
        other.put("sign", watcher.json.dumps(watcher.Sign(9999, 0, 0, "has ended", "rank 2 gives no sign of life")))
        watch.look()
        return stalled()

    watch.stalled = sign_arrives_first  # type: ignore[method-assign]
    assert "rank 2 gives no sign of life" in str(watch.judge())


@pytest.mark.parametrize("lost", [True, False])
def test_the_rank_that_keeps_the_store_stays_until_the_others_know_why_it_ends(lost: bool) -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, (0, 1)) for rank in range(2)]
    watches = [Watch(board, Calls(), lambda: True, lambda: None, [].__contains__, 600.0, 600.0) for board in boards]
    for watch in watches:
        watch.start()
    while any(all(sign is None for sign in watch._signs) for watch in watches):
        clock.sleep(0.01)
    if lost:
        watches[0].calls.lose(RuntimeError("rank 2 gives no sign of life"), told=True)
    before = clock.monotonic()
    watches[0].stop()
    seconds = clock.monotonic() - before
    theirs = watches[1]._signs[0]
    if lost:
        assert theirs is not None
        assert "rank 2 gives no sign of life" in theirs.lost
        assert seconds < LINGER
    else:
        assert seconds < PERIOD, "nobody waits where there is nothing to tell"
    watches[1].stop()


def test_the_rank_that_keeps_the_store_does_not_wait_for_a_rank_that_is_silent(time: Time) -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, (0, 1)) for rank in range(2)]
    watch = Watch(boards[0], Calls(), lambda: True, lambda: None, [1].__contains__, 2.0, 600.0)
    lives(boards[1], 1)
    for _ in range(3):
        watch.look()
        watch._ended(1)
    watch.calls.lose(RuntimeError("rank 1 has ended"), told=True)
    before = clock.monotonic()
    watch._linger()
    assert clock.monotonic() - before < PERIOD


def test_the_thread_that_waits_keeps_nothing_of_a_wait_that_is_over() -> None:
    waiter, message = Waiter(lambda: None), Time()
    alive = weakref.ref(message)
    waiter.wait(partial(repr, message))
    del message
    assert alive() is None
    waiter.stop()
