"""Watches the groups of this process from one thread: heartbeats, and what becomes of a group that is lost.

    each period    leave a heartbeat: the number and the chain of each group's calls, and whether the group is lost
                   read those of the ranks beside this one, and what has lost each group
                   judge: calls that differ, and waits that are too long
    a lost group   tell the others; results of calls that still run become NaN;
                   once every rank knows: let go of what this process's streams wait for

The caller hears at its next call. No process is ended here: that is the launcher's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from dfa_megatron.errors import AbsentError, DisagreementError, DistAttentionError, LostGroupError
from dfa_megatron.runtime.agreement.calls import Calls, first_difference
from dfa_megatron.runtime.agreement.store import (
    LOOKS,
    MARGIN,
    NOTHING,
    REQUESTS,
    GroupStore,
    bounded,
    heartbeat_of,
    named,
    nothing,
)

logger = logging.getLogger(__name__)

PERIOD, LONGEST = 0.5, 60.0
"""Seconds between two heartbeats, and between two requests of a store that does not answer."""
BESIDE = 64
"""Ranks of a group whose heartbeats a rank reads."""
_DIFFER, _SHOWS = "calls differ", "shows calls"


class State(NamedTuple):
    """Of a rank in a group: its last call's number and chain, what it does, and whether it knows of an error."""

    number: int
    chain: int
    doing: str
    lost: bool


_BEFORE = State(-1, 0, "", lost=False)
"""Before the first heartbeat."""


@dataclass(slots=True)
class Known:
    """What a rank knows of another.

    beat: its last heartbeat. changed: when that was new here. state: in the group.
    ended: its process has, or it has left the group; its last words, which may say why, have been read.
    """

    beat: object = None
    changed: float = 0.0
    state: State = _BEFORE
    ended: bool = False


class Watched:
    """What the watch knows of one group. Its time stands still while the process or the machine does.

    Args:
        store: of the group. calls: of this rank.
        alive: whether the group still exists. close: called on a thread of its own once it is destroyed.
        gone: whether the process of a rank is known to have ended.
        unblock: of the group's channel; returns whether something here still waits. blocked: what it returned last.
        timeout: the group's own: seconds for which a rank is waited for that lives but does something else. One that
            gives no sign of life is waited for a quarter of them.
    """

    def __init__(
        self,
        store: GroupStore,
        calls: Calls,
        alive: Callable[[], bool],
        close: Callable[[], None],
        gone: Callable[[int], bool],
        unblock: Callable[[bool], bool],
        timeout: float,
    ) -> None:
        self.store, self.calls, self.alive, self.close = store, calls, alive, close
        self.gone, self.unblock, self.timeout = gone, unblock, timeout
        self.wake, self.leave, self.patience = nothing, nothing, 2 * PERIOD + MARGIN
        self.others = [rank for rank in range(store.size) if rank != store.rank]
        self.beside = {(store.rank + step) % store.size: Known() for step in range(1, min(1 + BESIDE, store.size))}
        self.now, self.answered, self.lost = 0.0, 0.0, NOTHING
        self._gone, self._asides = set[int](), set[str]()
        self._since, self._at, self._warned, self._lost_at = 0.0, (0, "", -1), False, 0.0
        self.blocked = True

    def begin(self) -> State:
        """Return what this rank's heartbeat says, and write down the error that lost the group; the first rank's stays.

        Processes that have ended are noted before heartbeats are read: their last words are among those.
        """
        number, _, chain = self.calls.last
        if (lost := self.calls.lost) is not None and self.lost == NOTHING:
            said = f"rank {self.store.rank} of the group failed in its call {number}: {lost}"
            self.store.client.compare_set(self.store.lost, NOTHING, said)
        self._gone = {rank for rank in self.beside if self.gone(rank)}
        return State(number, chain, self.calls.doing, lost is not None)

    def hear(self, beats: Mapping[int, Mapping[str, Any]], lost: str) -> None:
        """Take heartbeats, by global rank, and what lost the group."""
        self.lost, now = lost, self.now
        for rank, known in self.beside.items():
            beat = beats[self.store.members[rank]]
            if known.beat != beat:
                known.beat, known.changed = beat, now
            state = beat.get(self.store.key)
            known.ended |= rank in self._gone or (state is None and known.state.number >= 0)  # it has closed the group
            known.state = known.state if state is None else State(*state)
        self.answered = now  # last: until then nobody is late

    def ended(self, rank: int) -> bool:
        """Whether a rank has ended or has left the group, and its last words, which may say why, have been read."""
        unanswered = self.now - self.answered > self.patience  # its store may have ended with it
        return self._known(rank).ended or (unanswered and self.gone(rank))

    def _known(self, rank: int) -> Known:
        return self.beside.get(rank) or Known()

    def silent(self) -> list[int]:
        """Return the ranks that have stopped: they have ended, or their heartbeats have stayed away."""
        # Only the time until the last reading counts: the store may not have answered since.
        late = [rank for rank, known in self.beside.items() if self.answered - known.changed > self.patience]
        found = [rank for rank in self.others if rank in late or self.ended(rank)]
        if self.now - self.answered <= self.patience:
            return found
        keeper = [rank for rank in self.others if rank == self.store.keeper and rank not in found]
        return found + keeper or self.others

    def judge(self) -> DistAttentionError | None:
        """Return the error that ends this run, if there is one: what another rank says is wrong comes first."""
        stalled = self.stalled()  # first: the heartbeat that shows a rank as ended also says why
        if self.differs():
            self._aside(_SHOWS, lambda: self._lose(self.difference()))
            return None
        return stalled if self.lost == NOTHING else LostGroupError(self.lost)

    def differs(self) -> bool:
        """Return whether ranks ran different calls."""
        states = [known.state for known in self.beside.values()]  # which another thread replaces
        theirs = [(self.calls.at(state.number), state.chain) for state in states]
        return self.lost == _DIFFER or any(mine is not None and mine.chain != chain for mine, chain in theirs)

    def _lose(self, error: DistAttentionError) -> None:
        logger.error("%s", error)
        self.calls.lose(error, told=False)

    def difference(self) -> DisagreementError:
        """Return an error with a table of the first call that differs, as far as ranks still show their calls."""
        mine, alone = self.calls.shown(), list[str | None]([None] * self.store.size)
        alone[self.store.rank], found = mine, [alone]

        def show() -> None:
            self.store.client.compare_set(self.store.lost, NOTHING, _DIFFER)
            found.append(self.store.gather("calls", mine, self.patience))
            self.store.gather("read the calls", "", 1.0)  # the store may end with this process

        with contextlib.suppress(RuntimeError, TimeoutError):
            bounded(show, 2 * self.patience)
        return DisagreementError(first_difference(found[-1]))

    def stalled(self) -> DistAttentionError | None:
        """Return the error of a wait that is too long. If all ranks live, log one warning per wait first."""
        step, awaited = self.calls.where() if self.calls.where is not None else (-1, ())
        at = (self.calls.last.number, self.calls.doing, step)
        if at != self._at or not (self.calls.doing or self.calls.pending()):
            self._at, self._since, self._warned = at, self.now, False
        waited = self.now - self._since
        if waited <= self.patience:
            return None
        silent, late = self.silent(), waited > self.timeout / 4
        if any(map(self.ended, silent)) or (silent and late) or waited > self.timeout:
            return AbsentError(self._waits(waited, awaited, silent))
        if late and not self._warned:
            self._warned = True
            logger.warning("%s", self._waits(waited, awaited, []))
        return None

    def broken(self) -> str:
        """Say which rank may have broken a connection; wait for the heartbeat that tells."""
        deadline = time.monotonic() + self.patience + 2 * PERIOD
        while time.monotonic() < deadline and self.calls.lost is None:
            if _SHOWS not in self._asides and (self.lost != NOTHING or any(map(self.ended, self.others))):
                break
            self.wake()
            time.sleep(LOOKS)
        if self.calls.lost is None and self.differs():
            return str(self.difference())
        said = self.calls.lost or ("" if self.lost == NOTHING else self.lost)
        return str(said) or "; ".join(map(self._text_of, self.silent()))

    def _waits(self, waited: float, awaited: Sequence[int], silent: Sequence[int]) -> str:
        """Say where this rank waits, and where the ranks are that it waits for."""
        number, doing, step = self._at
        place = f"call {number} ({doing or 'on the device'})" + (f", step {step}" if step >= 0 else "")
        behind = [rank for rank in sorted(self.beside) if self.beside[rank].state[::2] != (number, doing)]
        told = "; ".join(map(self._text_of, (silent or behind or awaited or self.others)[:8]))
        waits = f" for {named(self.store.members, awaited)}" if awaited else ""
        return f"rank {self.store.rank} has waited {waited:.0f} s in {place}{waits}: {told}"

    def _text_of(self, rank: int) -> str:
        known, who = self._known(rank), named(self.store.members, [rank])
        number, _, doing, _ = known.state
        place = f"after {number} calls or more" if number >= 0 else "before its first heartbeat"
        if self.ended(rank):
            return f"{who} has ended" + (f", {place}" if number >= 0 else "")
        if rank in self.silent():
            return f"{who} gives no sign of life since {self.now - known.changed:.0f} s, {place}"
        return f"{who} lives, {place}, and {doing or 'is outside of attention: it may compile, save, or not be called'}"

    def all_know(self) -> bool:
        """Return whether every rank beside this one knows that the group is lost, or cannot know."""
        told = [rank for rank, known in self.beside.items() if known.state.lost]
        return {*self.beside} <= {*told, *self.silent()} or self.now - self._lost_at > 2 * self.patience

    def tick(self, seconds: float) -> None:
        """Let time pass, and act on what is known by now."""
        self.now += seconds
        try:
            if not self.alive():
                self._aside("closes a group", self.close)
            elif self.calls.lost is None:
                self._lost_at = self.now
                if (found := self.judge()) is not None:
                    self._lose(found)
            elif self.blocked:
                self.blocked = self.unblock(self.all_know())
        except RuntimeError as error:  # of a device that has failed: nothing there waits any more
            self.blocked = False
            self._lose(LostGroupError(f"its device has failed: {error}"))

    def _aside(self, name: str, action: Callable[[], object]) -> None:
        """Do on a thread of its own, once, what may take long."""
        if name not in self._asides:
            self._asides.add(name)
            threading.Thread(target=action, name=f"dfa_megatron {name}", daemon=True).start()


class Watch:
    """Watches all groups of this process that share a store.

    client: this process's connection to the store. rank: global rank of this process. processes: their number.
    """

    def __init__(self, client: Store, rank: int, processes: int) -> None:
        self.client, self.rank, self.groups = client, rank, tuple[Watched, ...]()
        self.period = max(PERIOD, 2 * processes / REQUESTS)
        self.thread = threading.Thread(target=self._run, name="dfa_megatron watch", daemon=True)
        self._woken, self._turn, self._process, self._failed = threading.Event(), threading.Lock(), os.getpid(), 0

    def beat(self) -> None:
        """Leave a heartbeat, and read those of others: two requests."""
        with self._turn:  # the last heartbeat of a process must not be followed by an older one
            groups = self.groups
            states = {group.store.key: group.begin() for group in groups}
            self.client.set(heartbeat_of(self.rank), json.dumps({"at": time.time_ns(), **states}))
            ranks = sorted({group.store.members[rank] for group in groups for rank in group.beside})
            keys = [heartbeat_of(rank) for rank in ranks] + [group.store.lost for group in groups]
            found = self.client.multi_get(keys) if keys else []
            beats = {rank: json.loads(note) for rank, note in zip(ranks, found, strict=False)}
            for group, lost in zip(groups, found[len(ranks) :], strict=True):
                group.hear(beats, lost.decode())

    def tick(self, seconds: float) -> None:
        """Let time pass in all groups, and act on what is known."""
        for group in self.groups:
            group.tick(seconds)

    def watch(self, group: Watched) -> None:
        """Watch one group more."""
        self.groups += (group,)
        group.wake, group.leave = self._woken.set, lambda: self.leave(group)
        group.patience = 2 * self.period + MARGIN
        self._woken.set()

    def leave(self, group: Watched) -> None:
        """Watch a group no more; a last heartbeat says so, and the error that lost the group."""
        if group not in self.groups or os.getpid() != self._process:  # of which this is a fork
            return
        with _LOCK:
            self.groups = tuple(other for other in self.groups if other is not group)
        with contextlib.suppress(RuntimeError, TimeoutError):  # ranks end at different times, and the store with one
            bounded(lambda: (group.begin(), self.beat()), 4 * PERIOD)  # type: ignore[func-returns-value]
            if group.store.keeper == group.store.rank and group.calls.lost is not None:
                time.sleep(2 * self.period)  # until the others have read why: the store may end with this process
        if not self.groups and self.thread.is_alive():
            self._woken.set()
            self.thread.join(4 * PERIOD)

    def _run(self) -> None:
        from dfa_megatron.runtime.cuda_driver import driver

        relaxed, due, before, asks = False, 0.0, time.monotonic(), threading.Thread()
        try:
            while self.groups:
                lost = any(group.calls.lost is not None and group.blocked for group in self.groups)
                woken = self._woken.wait(LOOKS if lost else self.period)
                self._woken.clear()
                with contextlib.suppress(OSError, RuntimeError):  # no GPU here, none that is visible, or none yet
                    relaxed = relaxed or driver().relax_captures()  # to query events while another thread captures
                # A store that has stopped blocks who asks it, but not this thread.
                if not asks.is_alive() and (woken or time.monotonic() >= due):
                    asks = threading.Thread(target=self._ask, name="dfa_megatron heartbeat", daemon=True)
                    asks.start()
                    asks.join(self.period)
                    due = time.monotonic() + min(self.period * 2**self._failed, LONGEST)
                now = time.monotonic()
                self.tick(min(now - before, 2 * self.period))
                before = now
        except Exception:
            logger.exception("the watch has ended: nobody notices any more if a rank ends or stops")

    def _ask(self) -> None:
        try:
            self.beat()
            self._failed = 0
        except (RuntimeError, TypeError, ValueError) as error:  # a store that is gone, a note that is no heartbeat
            # Whoever still waits sees that nothing is heard. PyTorch writes a line for each failure: ask ever less.
            logger.debug("the store of the group does not answer: %s", error)
            self._failed += 1


_LOCK = threading.Lock()
_watches: list[Watch] = []


def watch(group: Watched, rank: int, processes: int) -> None:
    """Watch a group from now on; one thread serves all groups of a process."""
    with _LOCK:
        _watches[:] = [each for each in _watches if each.groups]
        for known in _watches:
            if known.client is group.store.client:
                return known.watch(group)
        _watches.append(made := Watch(group.store.client, rank, processes))
        made.watch(group)
        made.thread.start()
