"""The watcher of a group: compares the ranks' calls, notices ranks that stopped, and ends a run that cannot go on."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dfa_megatron.errors import AbsentError, DisagreementError, DistAttentionError, LostGroupError
from dfa_megatron.runtime.agreement.awake import AwakeClock
from dfa_megatron.runtime.agreement.board import Board, named
from dfa_megatron.runtime.agreement.calls import Calls
from dfa_megatron.runtime.agreement.difference import Shown, first_difference, read, written
from dfa_megatron.runtime.agreement.stuck import Stuck
from dfa_megatron.runtime.agreement.waiter import bounded

logger = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two looks at the other ranks."""
SILENT = 4 * PERIOD + 1.0
"""Seconds without a sign of life after which a rank counts as stopped."""
GRACE = 5.0
"""Seconds for a caller inside of attention to come back and raise the error, before the process is ended."""
_LOOKS = 0.05
"""Seconds between two looks at whether it has come back."""
LINGER = 4 * PERIOD
"""Seconds that the last sign of a thread may take; a store that ends with this process stays that long for readers."""
_LONGEST = 60.0
"""Seconds between two attempts to reach a store that fails, at most."""
EXIT_STATUS = 70
"""Of a process that the watcher ended."""

_FAILED = "of the group failed in its call"


class Sign(NamedTuple):
    """A sign of life: a counter, number and chain of the last call, the present state, and the error, if any."""

    beat: int
    number: int
    chain: int
    doing: str
    lost: str


class Watch:
    """Watch one group from two threads, until `stop` or until the group is destroyed.

    One thread writes and reads signs of life. The other judges them; it goes on if the first is stuck in a store that
    no longer answers.

    Args:
        board: of the group.
        calls: of this rank.
        alive: whether the group still exists.
        ended: called on the watcher's thread once the group is destroyed; the thread ends then.
        gone: whether the process of a rank is known to have ended.
        stall: seconds to wait for a rank that gives no sign of life; 0 is no limit.
        patience: seconds to wait for a rank that lives but does something else: the group's own timeout.
    """

    def __init__(
        self,
        board: Board,
        calls: Calls,
        alive: Callable[[], bool],
        ended: Callable[[], None],
        gone: Callable[[int], bool],
        stall: float,
        patience: float,
    ) -> None:
        self.board, self.calls, self.alive, self.ended, self.gone = board, calls, alive, ended, gone
        self.stall, self.patience = stall, patience
        self._beat, self._process = 0, os.getpid()
        self._signs: list[Sign | None] = [None] * board.size
        self._clock = AwakeClock(2 * PERIOD)
        self._heard, self._seen = 0.0, [0.0] * board.size
        self._looks, self._gone_at = 0, dict[int, int]()
        self._since, self._at, self._warned = 0.0, (0, "", -1), False
        self._stuck, self._logged = Stuck(calls), False
        self._stopped, self._news = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dfa_megatron watcher", daemon=True)
        self._signs_thread = threading.Thread(target=self._exchange, name="dfa_megatron signs", daemon=True)

    def start(self) -> None:
        """Start; the ranks of the group need not do so together."""
        self._news.set()
        self._signs_thread.start()
        self._thread.start()

    def stop(self) -> None:
        """Give a last sign and end."""
        if not self._stopped.is_set() and os.getpid() == self._process:  # and not in a fork of it
            self._stopped.set()
            self._news.set()
            for thread in (self._signs_thread, self._thread):
                if thread is not threading.current_thread() and thread.ident is not None:
                    thread.join(LINGER)

    def sign(self, ended: bool = False) -> None:
        """Leave a sign of life."""
        self._beat += 1
        last, lost = self.calls.last, self.calls.lost
        doing = "has ended" if ended else self.calls.doing
        sign = Sign(self._beat, last.number, last.chain, doing, "" if lost is None else str(lost))
        self.board.put("sign", json.dumps(sign))

    def look(self) -> None:
        """Read the others' signs. A rank without one is not missed: it may not have started yet."""
        others = (rank for rank in range(self.board.size) if rank != self.board.rank)
        known = [rank for rank in others if self._signs[rank] is not None or self.board.has("sign", rank)]
        for rank, note in zip(known, self.board.read("sign", known), strict=True):
            sign = Sign(*json.loads(note))
            if self._signs[rank] != sign:
                self._signs[rank], self._seen[rank] = sign, self._clock.now()
        self._looks, self._heard = self._looks + 1, self._clock.now()

    def compare(self) -> DistAttentionError | None:
        """Return the error if ranks ran different calls or one has failed, else None."""
        for sign in filter(None, self._signs):
            mine = self.calls.at(sign.number)
            if mine is not None and mine.chain != sign.chain:
                return self.difference()
        quoted = None
        for rank, theirs in enumerate(self._signs):
            if theirs is not None and theirs.lost:
                if _FAILED not in theirs.lost:
                    return LostGroupError(f"rank {rank} {_FAILED} {theirs.number}: {theirs.lost}")
                quoted = LostGroupError(theirs.lost)  # it has this from another rank
        return quoted

    def difference(self, everyone: Sequence[Shown] = ()) -> DisagreementError:
        """Return an error with a table of the first call that differs.

        everyone: what each rank shows of its last calls; () asks through the store, as far as ranks still answer there.
        """
        shown = [Shown() for _ in range(self.board.size)]
        shown[self.board.rank] = read(written(self.calls))
        try:
            bounded(lambda: self._show(shown, wait=not everyone), SILENT + PERIOD, _nothing, TimeoutError)
        except (RuntimeError, TimeoutError) as error:
            logger.debug("the store does not show the calls of every rank: %s", error)
        return DisagreementError(first_difference(everyone or shown))

    def _show(self, shown: list[Shown], *, wait: bool) -> None:
        """Show this rank's last calls in the store, and wait for the other ranks'."""
        self.board.put("calls", written(self.calls))
        missing = {rank for rank in range(self.board.size) if rank != self.board.rank} if wait else set[int]()
        deadline = time.monotonic() + SILENT
        while missing and time.monotonic() < deadline:
            for rank in [rank for rank in missing if self.board.has("calls", rank)]:
                shown[rank] = read(self.board.read("calls", [rank])[0])
                missing.remove(rank)
            time.sleep(0.02)

    def silent(self) -> list[int]:
        """Return the ranks that have stopped: their processes are gone, or their signs stayed away for a while."""
        heard = self._heard
        others = [rank for rank in range(self.board.size) if rank != self.board.rank]
        # A sign that was not read since the store last answered is no evidence against its rank.
        known = [rank for rank in others if self._ended(rank) or heard - self._seen[rank] > SILENT]
        if self._clock.now() - heard <= SILENT:
            return known
        keeper = [rank for rank in others if rank == self.board.keeper and rank not in known]
        return known + keeper or others

    def suspects(self) -> str:
        """Say which rank may have broken a connection, after waiting long enough for each rank's next sign."""
        deadline = time.monotonic() + SILENT + 2 * PERIOD
        while time.monotonic() < deadline:
            failed = [r for r, sign in enumerate(self._signs) if sign is not None and sign.lost]
            if failed:
                return f"rank {failed[0]} of the group failed: {self._signs[failed[0]].lost}"  # type: ignore[union-attr]
            if any(self._ended(rank) for rank in range(self.board.size)):
                break
            time.sleep(0.02)
        if (found := self.calls.lost or self.compare()) is not None:  # a rank that ran other calls, and then ended
            return str(found)
        return "; ".join(self._state(rank) for rank in self.silent())

    def _ended(self, rank: int) -> bool:
        """Whether a rank has ended, and its last sign, which may say why, has been read."""
        sign = self._signs[rank]
        if sign is not None and sign.doing == "has ended":
            return True
        if rank == self.board.rank or not self.gone(rank):
            return False
        looked = self._looks > self._gone_at.setdefault(rank, self._looks) + 1  # a look began and ended since
        return looked or self._clock.now() - self._heard > SILENT

    def _exchange(self) -> None:
        """Write and read signs, until the end."""
        pause = PERIOD
        while self.alive() and not self._stopped.is_set():
            # PyTorch writes a line for each failure of a store, so that one that is gone is asked less and less.
            pause = PERIOD if self._with_store(self._sign_and_look) else min(max(2 * pause, LINGER), _LONGEST)
            self._news.wait(pause)
            self._news.clear()
        if pause == PERIOD:
            self._with_store(self._last_sign)

    def _sign_and_look(self) -> None:
        self.sign()
        self.look()

    def _last_sign(self) -> None:
        self.sign(ended=True)
        if self.board.keeps and self.calls.lost is not None:
            self._linger()

    def _with_store(self, action: Callable[[], None]) -> bool:
        """Survive an error of the store: ranks end at different times, and the store with one of them.

        Only a rank that still waits for others is concerned: `silent` sees that nothing is heard.
        """
        try:
            action()
        except RuntimeError as error:
            logger.debug("the store of the group does not answer: %s", error)
            return False
        return True

    def _linger(self) -> None:
        """Stay until each rank that lives has read the last sign, which says what lost the group."""
        self.look()
        before, deadline = list(self._signs), time.monotonic() + LINGER - PERIOD
        # A rank signs, then looks: its second sign from now on shows that it has looked in between.
        while time.monotonic() < deadline and any(
            old is not None and new is not None and new.beat < old.beat + 2 and rank not in self.silent()
            for rank, (old, new) in enumerate(zip(before, self._signs, strict=True))
        ):
            time.sleep(0.02)
            self.look()

    def _watch(self) -> None:
        try:
            self._run()
        except Exception:
            logger.exception("the watcher of a group has ended: nobody notices any more if a rank of it ends or stops")

    def _run(self) -> None:
        _allow_captures()
        while not self._stopped.wait(PERIOD if self.calls.lost is None else _LOOKS):
            self._clock.tick()
            if not self.alive():
                self.ended()
                return
            if self.calls.lost is None and (found := self.judge()) is not None:
                self.calls.lose(found, told=False)
                self._news.set()
            if self.calls.lost is not None and not self.calls.told:
                self._end_if_stuck(self.calls.lost)

    def judge(self) -> DistAttentionError | None:
        """Return the error that ends this run, if there is one: what another rank says is wrong comes first."""
        stalled = self.stalled()
        return self.compare() or stalled  # in this order: the sign that shows a rank as ended also says why

    def stalled(self) -> DistAttentionError | None:
        """Return the error of a wait that is too long. If all ranks live, log one warning per wait instead."""
        if not self.calls.doing and not self.calls.pending():
            self._since, self._warned = self._clock.now(), False
            return None
        step, awaited = self.calls.where() if self.calls.where is not None else (-1, ())
        at = (self.calls.last.number, self.calls.doing, step)
        if at != self._at:
            self._at, self._since, self._warned = at, self._clock.now(), False
        waited, silent = self._clock.now() - self._since, self.silent()
        ended = [rank for rank in silent if self._ended(rank)]
        if ended and waited > SILENT:
            return AbsentError(self._waits(waited, awaited, silent))
        if self.stall == 0 or waited < self.stall:
            return None
        if silent or waited > self.patience:
            return AbsentError(self._waits(waited, awaited, silent))
        if not self._warned:
            self._warned = True
            logger.warning("%s", self._waits(waited, awaited, []))
        return None

    def _waits(self, waited: float, awaited: Sequence[int], silent: Sequence[int]) -> str:
        """Say where this rank waits, and where the ranks are that it waits for."""
        number, doing, step = self._at
        place = f"call {number} ({doing or 'on the device'})" + (f", step {step}" if step >= 0 else "")
        others = [rank for rank in range(self.board.size) if rank != self.board.rank]
        behind = [r for r in others if (sign := self._signs[r]) is None or (sign.number, sign.doing) != (number, doing)]
        told = "; ".join(self._state(rank) for rank in (silent or behind or awaited or others)[:8])
        waits = f" for {named(self.board.members, awaited)}" if awaited else ""
        return f"rank {self.board.rank} has waited {waited:.0f} s in {place}{waits}: {told}"

    def _state(self, rank: int) -> str:
        sign, who = self._signs[rank], named(self.board.members, [rank])
        # The sign is up to a period old: more calls may have followed it.
        place = f"after {sign.number} calls or more" if sign is not None else "before its first sign"
        if self._ended(rank):
            return f"{who} has ended, {place}"
        if rank in self.silent():
            return f"{who} gives no sign of life since {self._clock.now() - self._seen[rank]:.0f} s, {place}"
        doing = (sign.doing if sign else "") or "is outside of attention: it may compile, or write a checkpoint"
        return f"{who} lives, {place}, and {doing}"

    def _end_if_stuck(self, error: DistAttentionError) -> None:
        """End the process if it does not come back to raise the error; outside of attention it may do what it likes."""
        if not self._logged:
            self._logged = True
            logger.error("%s", error)
        if self._stuck.seconds(self._clock.now()) < GRACE or self.calls.told:
            return
        print(f"dfa_megatron ends this process, which does not come back: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)


def _nothing() -> None:
    """A wait that nothing interrupts."""


def _allow_captures() -> None:
    """Let this thread query CUDA events while another one captures a graph."""
    from dfa_megatron.runtime.cuda_driver import driver

    try:
        driver().relax_captures()
    except OSError as error:  # no GPU here
        logger.debug("no CUDA driver: %s", error)
