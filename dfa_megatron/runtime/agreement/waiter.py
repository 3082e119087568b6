"""Waiting on a CPU for messages that may never come: a thread waits in gloo, so that this one hears of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_PERIOD = 0.05
"""Seconds between two looks whether waiting has become pointless."""


class _Task:
    """Something to wait for, and how it went."""

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
    """Waits one after another for what blocks without end; gloo's own timeouts would break its connections.

    check: called meanwhile; it raises where waiting has become pointless. The thread then stays in its wait.
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
        """End the thread, if it waits for nothing."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()


def bounded(action: Callable[[], T], seconds: float, check: Callable[[], None], overdue: Callable[[], Exception]) -> T:
    """What an action returns that may block for ever: then, after some seconds, raise; its thread stays where it is.

    check: called meanwhile; it raises where waiting has become pointless. overdue: makes the error.
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
