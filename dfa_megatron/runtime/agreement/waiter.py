"""Interruptible waits: a second thread blocks in gloo or in a store, so that the caller can still see errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from dfa_megatron.errors import LostGroupError

T = TypeVar("T")

_PERIOD = 0.05
"""Seconds between two checks for errors during a wait."""


_Task = tuple[Callable[[], object], threading.Event, list[BaseException]]
"""A blocking call, set once it is over, and its error if it raised one."""


class Waiter:
    """Run blocking calls one after another on a thread of its own; gloo's own timeouts would break its connections.

    check: called during each wait; raises to give it up. The thread then stays in its blocking call.
    told: returns the error to raise for a RuntimeError of a blocking call; None: the same.
    """

    def __init__(self, check: Callable[[], None], told: Callable[[RuntimeError], BaseException] | None = None) -> None:
        self._check, self._told = check, told
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, blocking: Callable[[], object]) -> None:
        """Return when `blocking` has; raise what it raises, or what `told` makes of that."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dfa_megatron waiter", daemon=True)
            self._thread.start()
        done, errors = threading.Event(), list[BaseException]()
        self._tasks.put((blocking, done, errors))
        while not done.wait(_PERIOD):
            self._check()
        for error in errors:
            if self._told is not None and isinstance(error, RuntimeError):
                raise self._told(error) from error
            raise error

    def stop(self) -> None:
        """End the thread, unless it is inside a blocking call."""
        self._told = _stopped  # the given one may refer to who owns this
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            blocking, done, errors = task
            try:
                blocking()
            except BaseException as error:  # noqa: BLE001 -- the thread that asked raises it
                errors.append(error)
            # The caller frees what was waited for: freed here, in a thread that outlives the interpreter, it aborts.
            del task, blocking, errors
            done.set()


def _stopped(error: RuntimeError) -> BaseException:
    return LostGroupError(f"its process group was destroyed on this rank or another, which waited in it ({error})")


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
