"""The watchdog of a process: heartbeats, ranks that have ended or stopped, and the end of a process that is stuck.

A process leaves one heartbeat for all of its groups, and reads those of a few neighbours in each; while it waits long
in a call, those of all ranks of that group. A heartbeat says when the next one is due: soon if attention runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch.distributed.distributed_c10d import Store

from dfa_megatron.errors import AbsentError, DisagreementError, DistAttentionError, LostGroupError
from dfa_megatron.runtime.agreement.calls import Calls, first_difference
from dfa_megatron.runtime.agreement.store import (
    LOOKS,
    MARGIN,
    NOTHING,
    REQUESTS,
    GroupStore,
    Heartbeat,
    State,
    bounded,
    heartbeat_of,
    named,
    nothing,
)

logger = logging.getLogger(__name__)

PERIOD, IDLE = 0.5, 60.0
"""Seconds between two heartbeats of a process that runs attention, and of one that has run none for `_QUIET`."""
_QUIET, _LEFT = 10.0, 32
"""... and the groups left of which heartbeats still tell."""
_NEIGHBOURS, _MORE = 8, 64
"""Ranks whose heartbeats one reads, and how many of the others in turn while it waits long."""
SILENT = 2 * PERIOD + MARGIN
"""Seconds without a heartbeat after which a rank that runs attention counts as stopped."""
GRACE = 5.0
"""Seconds in which a caller comes back before the process is ended; inside of a call a quarter of the timeout."""
EXIT_STATUS = 70
"""Of a process that the watchdog ended."""
_BUSY = 0.05
"""Share of its time for which a thread runs at least that waits for a device: CUDA's waits spin."""
_DIFFER, _ENDED = "calls differ", "has ended"


class Watched:
    """What the watchdog knows of one group. Its time stands still while the process or the machine does.

    Args:
        store: of the group. calls: of this rank.
        alive: whether the group still exists. close: called on a thread of its own once it is destroyed.
        gone: whether the process of a rank is known to have ended.
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
        timeout: float,
    ) -> None:
        self.store, self.calls, self.alive, self.close = store, calls, alive, close
        self.gone, self.timeout, self.wake, self.leave, self.patience = gone, timeout, nothing, nothing, SILENT
        self.others = [rank for rank in range(store.size) if rank != store.rank]
        self.now, self.answered, self.lost, self._told = 0.0, 0.0, NOTHING, False
        self._beats, self._changed, self._heard = dict[int, Heartbeat](), dict[int, float](), dict[int, float]()
        self._since, self._at, self._warned = 0.0, (0, "", -1), False
        self._looks, self._gone_at, self._begun = 0, dict[int, int](), set[str]()
        self._stuck_at, self._stuck_since, self._spent = object(), 0.0, 0.0

    def state(self, *, ended: bool = False) -> State:
        """Return what this rank's heartbeat says of the group."""
        return [self.calls.last.number, self.calls.last.chain, _ENDED if ended else self.calls.doing]

    def asked(self) -> list[int]:
        """Return the ranks whose heartbeats are read: the next few; while this one waits long, others in turn."""
        steps = [*range(1, 1 + _NEIGHBOURS)]
        if self.now - self._since > 2 * PERIOD:
            steps += range(self._looks * _MORE, (self._looks + 1) * _MORE)
        return sorted({(self.store.rank + step) % self.store.size for step in steps} - {self.store.rank})

    def tell(self) -> None:
        """Write down the error that lost the group; the first rank's stays."""
        if self.calls.lost is not None and not self._told:
            self._told = True
            said = f"rank {self.store.rank} of the group failed in its call {self.calls.last.number}: {self.calls.lost}"
            self.store.client.compare_set(self.store.lost, NOTHING, said)

    def hear(self, beats: Mapping[int, Heartbeat], lost: str) -> None:
        """Take heartbeats, by global rank, and what lost the group."""
        self.lost, self.answered, self._looks = lost, self.now, self._looks + 1
        for rank in self.others:
            if (beat := beats.get(self.store.members[rank])) is not None:
                if self._beats.get(rank) != beat:
                    self._beats[rank], self._changed[rank] = beat, self.now
                self._heard[rank] = self.now

    def last_of(self, rank: int) -> State | None:
        """Return what the last heartbeat of a rank says of the group; None: nothing so far."""
        return self._beats[rank].groups.get(self.store.key) if rank in self._beats else None

    def ended(self, rank: int) -> bool:
        """Whether a rank has ended, and its last words, which may say why, have been read."""
        state = self.last_of(rank)
        if state is not None and state[2] == _ENDED:
            return True
        if rank == self.store.rank or not self.gone(rank):
            return False
        looked = self._looks > self._gone_at.setdefault(rank, self._looks) + 1  # a look began and ended since
        return looked or self.now - self.answered > self.patience

    def silent(self) -> list[int]:
        """Return the ranks that have stopped: they have ended, or their heartbeats have stayed away."""
        # Only the time between two readings counts: the store may not have answered since.
        missed = {rank: self._heard[rank] - self._changed[rank] for rank, beat in [*self._beats.items()] if beat.due}
        late = [rank for rank, seconds in missed.items() if seconds > 2 * self._beats[rank].due + MARGIN]
        known = [rank for rank in self.others if rank in late or self.ended(rank)]
        if self.now - self.answered <= self.patience:
            return known
        keeper = [rank for rank in self.others if rank == self.store.keeper and rank not in known]
        return known + keeper or self.others

    def judge(self) -> DistAttentionError | None:
        """Return the error that ends this run, if there is one: what another rank says is wrong comes first.

        Calls that differ take a while to show, and other groups are judged meanwhile.
        """
        stalled = self.stalled()  # first: the heartbeat that shows a rank as ended also says why
        if self.differs():
            self._apart("shows calls", lambda: self._lose(self.difference()))
            return None
        return stalled if self.lost == NOTHING else LostGroupError(self.lost)

    def differs(self) -> bool:
        """Return whether ranks ran different calls."""
        theirs = [(self.calls.at(state[0]), state[1]) for state in map(self.last_of, self.others) if state is not None]
        return self.lost == _DIFFER or any(mine is not None and mine.chain != chain for mine, chain in theirs)

    def _apart(self, name: str, action: Callable[[], object]) -> None:
        """Do once, on a thread of its own, what may take long."""
        if name not in self._begun:
            self._begun.add(name)
            threading.Thread(target=action, name=f"dfa_megatron {name}", daemon=True).start()

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
        if waited <= SILENT:
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
        deadline = time.monotonic() + SILENT + 2 * PERIOD
        while time.monotonic() < deadline and self.lost == NOTHING and not any(map(self.ended, self.others)):
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
        behind = [rank for rank in sorted(self._beats) if (self.last_of(rank) or ())[::2] != [number, doing]]
        told = "; ".join(map(self._text_of, (silent or behind or awaited or self.others)[:8]))
        waits = f" for {named(self.store.members, awaited)}" if awaited else ""
        return f"rank {self.store.rank} has waited {waited:.0f} s in {place}{waits}: {told}"

    def _text_of(self, rank: int) -> str:
        state, who = self.last_of(rank), named(self.store.members, [rank])
        place = f"after {state[0]} calls or more" if state is not None else "before its first heartbeat"
        if self.ended(rank):
            return f"{who} has ended, {place}"
        if rank in self.silent():
            return f"{who} gives no sign of life since {self.now - self._changed.get(rank, 0.0):.0f} s, {place}"
        doing = (state[2] if state else "") or "is outside of attention: it may compile, or write a checkpoint"
        return f"{who} lives, {place}, and {doing}"

    def tick(self, seconds: float) -> None:
        """Let time pass, and act on what is known by now."""
        self.now += seconds
        if not self.alive():
            self._apart("closes a group", self.close)
        elif self.calls.lost is None and (found := self.judge()) is not None:
            self._lose(found)
        elif self.calls.lost is not None and not self.calls.told:
            grace = max(GRACE, self.timeout / 4) if self.calls.doing else GRACE  # a kernel may compile in a call
            if self.stuck() >= grace and not self.calls.told:
                print(f"dfa_megatron ends this process, which does not come back: {self.calls.lost}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(EXIT_STATUS)

    def stuck(self) -> float:
        """Return for how long the process is stuck in a call, where it is exposed, or in a wait for a device.

        A process that does something else is outside, such as one that writes a checkpoint, evaluates, stands in a
        debugger or waits for its user. So is one whose signal handler runs, and one whose other threads must end before
        it may. To be asked every few hundredths of a second.
        """
        at, about = _place(self.calls), [_about(thread, "stat") for thread in self.calls.threads]
        ticks = [int(number) for text in about for number in text.rpartition(")")[2].split()[11:13]]
        spent = sum(ticks) / os.sysconf("SC_CLK_TCK")
        if at is None or at != self._stuck_at:
            self._stuck_at, self._stuck_since, self._spent = at, self.now, spent
        waited = self.now - self._stuck_since
        return waited if self.calls.doing or self.calls.exposed or spent - self._spent >= _BUSY * waited else 0.0


def _place(calls: Calls) -> object:
    """Return where the process stands inside of attention, or None outside. If that changes, it is not stuck."""
    inside, callers = bool(calls.doing), calls.threads
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    handles = any(code in handlers for code, _ in _stack(threading.main_thread()))
    if not (inside or calls.exposed or calls.pending()) or handles:
        return None
    # The caller's own place inside of a call says nothing: it may look for errors, or be blocked.
    waits = () if inside else [*map(_stack, callers)]
    others = [_about(x, "status") for x in threading.enumerate() if x not in callers and not x.daemon]
    # How often a thread has given up its processor grows unless it stays blocked.
    return inside, waits, [line for status in others for line in status.splitlines() if line.startswith("voluntary")]


def _stack(thread: threading.Thread) -> list[tuple[object, int]]:
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else [(at.f_code, at.f_lasti) for at, _ in traceback.walk_stack(frame)]


def _about(thread: threading.Thread, what: str) -> str:
    try:
        with open(f"/proc/self/task/{thread.native_id}/{what}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # it has ended, or the system is another one
        return ""


class Watchdog:
    """Watches all groups of this process from two threads: one talks to the store, the other judges what it heard.

    The second goes on if the first is stuck in a store that no longer answers. client: this process's connection to it.
    rank: global rank of this process. processes: their number.
    """

    def __init__(self, client: Store, rank: int, processes: int) -> None:
        self.client, self.rank, self.groups = client, rank, tuple[Watched, ...]()
        self.period = max(PERIOD, 2 * processes / REQUESTS)
        self._numbers, self._quiet = list[int](), 0.0
        self._news, self._over, self._turn = threading.Event(), threading.Event(), threading.Lock()
        self._process = os.getpid()
        names = {"dfa_megatron heartbeats": self._beat, "dfa_megatron watchdog": self._judge}
        self.threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in names.items()]

    @property
    def due(self) -> float:
        """Seconds until the next heartbeat."""
        return self.period if self._quiet < _QUIET else max(IDLE, self.period)

    def beat(self) -> None:
        """Leave a heartbeat, and read those of others: two requests."""
        with self._turn:  # the last heartbeat of a thread that ends must not follow a newer one
            groups, own = self.groups, heartbeat_of(self.rank)
            for group in groups:
                group.tell()
            states = _left | {group.store.key: group.state() for group in groups}
            self.client.set(own, json.dumps(Heartbeat(time.time_ns(), self.due, states)))
            ranks = sorted({group.store.members[rank] for group in groups for rank in group.asked()})
            keys = [heartbeat_of(rank) for rank in ranks] + [group.store.lost for group in groups]
            found = self.client.multi_get(keys) if keys else []
            beats = {rank: Heartbeat(*json.loads(note)) for rank, note in zip(ranks, found, strict=False)}
            for group, lost in zip(groups, found[len(ranks) :], strict=True):
                group.hear(beats, lost.decode())

    def tick(self, seconds: float) -> None:
        """Let time pass in all groups, and act on what is known."""
        calls, idle = [group.calls for group in self.groups], self._quiet >= _QUIET
        numbers = [each.last.number for each in calls]
        runs = numbers != self._numbers or any(each.doing or each.exposed or each.pending() for each in calls)
        self._numbers, self._quiet = numbers, 0.0 if runs else self._quiet + seconds
        if runs and idle:
            self._news.set()
        for group in self.groups:
            group.tick(seconds)

    def watch(self, group: Watched) -> None:
        """Watch one group more."""
        self.groups += (group,)
        group.wake, group.leave, group.patience = self._news.set, partial(self.leave, group), 2 * self.period + MARGIN
        self._news.set()

    def leave(self, group: Watched) -> None:
        """Watch a group no more; a last heartbeat says so, and the error that lost the group."""
        if group not in self.groups or os.getpid() != self._process:  # of which this is a fork
            return
        with _LOCK:
            self.groups = tuple(other for other in self.groups if other is not group)
            _left[group.store.key] = group.state(ended=True)
            for key in [*_left][:-_LEFT]:
                del _left[key]
        with contextlib.suppress(RuntimeError, TimeoutError):  # ranks end at different times, and the store with one
            bounded(lambda: (group.tell(), self.beat()), 4 * PERIOD)  # type: ignore[func-returns-value]
            if group.store.keeper == group.store.rank and group.calls.lost is not None:
                time.sleep(2 * self.period)  # until the others have read why: the store may end with this process
        if not self.groups:
            self._over.set()
            self._news.set()
            for thread in filter(threading.Thread.is_alive, self.threads):
                thread.join(4 * PERIOD)

    def _beat(self) -> None:
        pause = 0.0
        while self.groups:
            self._news.wait(pause)
            self._news.clear()
            try:
                self.beat()
                pause = self.due
            except (RuntimeError, TypeError, ValueError) as error:  # a store that is gone, a note that is no heartbeat
                # Whoever still waits sees that nothing is heard. PyTorch writes a line for each failure: ask ever less.
                logger.debug("the store of the group does not answer: %s", error)
                pause = min(max(2 * pause, 4 * PERIOD), IDLE)

    def _judge(self) -> None:
        from dfa_megatron.runtime.cuda_driver import driver

        relaxed, seconds = False, PERIOD
        try:
            while not self._over.wait(seconds):
                with contextlib.suppress(OSError, RuntimeError):  # no GPU here, none that is visible, or none yet
                    relaxed = relaxed or driver().relax_captures()  # to query events while another thread captures
                self.tick(seconds)
                lost = any(group.calls.lost is not None and not group.calls.told for group in self.groups)
                seconds = LOOKS if lost else PERIOD
        except Exception:
            logger.exception("the watchdog has ended: nobody notices any more if a rank ends or stops")


_LOCK = threading.Lock()
_left: dict[str, State] = {}
"""The last states of the groups that this process has left, the latest at the end."""
_watchdogs: list[Watchdog] = []


def watch(group: Watched, rank: int, processes: int) -> None:
    """Have the watchdog of this process watch a group from now on; one is started if there is none."""
    with _LOCK:
        _watchdogs[:] = [each for each in _watchdogs if each.groups]
        for known in _watchdogs:
            if known.client is group.store.client:
                return known.watch(group)
        _watchdogs.append(made := Watchdog(group.store.client, rank, processes))
        made.watch(group)
        for thread in made.threads:
            thread.start()
