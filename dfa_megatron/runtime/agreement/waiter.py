"""Interruptible waits: a second thread blocks in gloo or in a store, so that the caller can still see errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_PERIOD = 0.05
"""Seconds between two checks for errors during a wait."""


class _Task:
    """One blocking call and its outcome."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait, self.done = wait, threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001 -- the thread that asked raises it
            self.error = error
        self.done.set()


class Waiter:
    """Run blocking calls one after another on a thread of its own; gloo's own timeouts would break its connections.

    check: called during each wait; raises to give it up. The thread then stays in its blocking call.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, blocking: Callable[[], object]) -> None:
        """Return when `blocking` has; raise what it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dfa_megatron waiter", daemon=True)
            self._thread.start()
        task = _Task(blocking)
        self._tasks.put(task)
        while not task.done.wait(_PERIOD):
            self._check()
        if task.error is not None:
            raise task.error

    def stop(self) -> None:
        """End the thread, unless it is inside a blocking call."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()


def bounded(action: Callable[[], T], seconds: float, check: Callable[[], None], overdue: Callable[[], Exception]) -> T:
    """Return the result of an action that may block for ever, or raise after some seconds.

    A thread that is still blocked then stays so.

    Args:
        action: runs on a thread of its own.
        seconds: to wait at most.
        check: called during the wait; raises to give it up.
        overdue: makes the error to raise after `seconds`.
    """
    deadline, found = time.monotonic() + seconds, list[T]()

    def look() -> None:
        check()
        if time.monotonic() > deadline:
            raise overdue()

    waiter = Waiter(look)
    try:
        waiter.wait(lambda: found.append(action()))
    finally:
        waiter.stop()
    return found[0]
