"""Whether this process is stuck inside of attention: the watcher ends it then, and at no other time."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import CodeType, FrameType

from dfa_megatron.runtime.agreement.calls import Calls

_BUSY = 0.05
"""Share of its time for which a thread runs at least that waits for a device: CUDA's waits spin."""

_Stack = tuple[tuple[CodeType, int], ...]


class Stuck:
    """How long the process has been stuck: inside of a call, or in a wait for a device that works on one.

    A process that does something else is outside, such as one that writes a checkpoint, evaluates, stands in a debugger
    or waits for its user. So is one whose signal handler runs, and one whose other threads must end before it may.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._at: object = None
        self._since = self._spent = 0.0

    def seconds(self, now: float) -> float:
        """Return for how long, at a time `now`; to be asked every few hundredths of a second."""
        at, spent = self._place(), _seconds_of(self.calls.threads)
        if at is None or at != self._at:
            self._at, self._since, self._spent = at, now, spent
        waited = now - self._since
        if self._at is None or (not self.calls.doing and spent - self._spent < _BUSY * waited):
            return 0.0
        return waited

    def _place(self) -> object:
        """Return where the process stands inside of attention, or None outside. If that changes, it is not stuck."""
        inside = bool(self.calls.doing)
        if not inside and not self.calls.pending():
            return None
        frames, callers = sys._current_frames(), self.calls.threads
        if _handles_a_signal(frames.get(threading.main_thread().ident or 0)):
            return None
        # The caller's own place inside of a call says nothing: it may look for errors, or be blocked.
        waits = () if inside else [_stack(frames.get(thread.ident or 0)) for thread in callers]
        others = [thread for thread in threading.enumerate() if thread not in callers and not thread.daemon]
        return inside, waits, [(thread.ident, _sleeps(thread)) for thread in others]


def _stack(frame: FrameType | None) -> _Stack:
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _handles_a_signal(frame: FrameType | None) -> bool:
    handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
    return any(code in handlers for code, _ in _stack(frame))


def _seconds_of(threads: tuple[threading.Thread, ...]) -> float:
    """Return the processor's time that threads have taken; those that have ended count no more."""
    numbers = [_about(thread, "stat").rpartition(")")[2].split()[11:13] for thread in threads]
    return sum(int(ticks) for both in numbers for ticks in both) / os.sysconf("SC_CLK_TCK")


def _sleeps(thread: threading.Thread) -> list[str]:
    """Return how often a thread has given up its processor: it grows unless the thread stays blocked."""
    return [line for line in _about(thread, "status").splitlines() if line.startswith("voluntary_ctxt_switches")]


def _about(thread: threading.Thread, what: str) -> str:
    try:
        with open(f"/proc/self/task/{thread.native_id}/{what}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # it has ended, or the system is another one
        return ""
