"""A clock of the time that a process runs: it stands still while the process is stopped or the machine is."""

from __future__ import annotations

import threading
import time


class AwakeClock:
    """Seconds that this process has run, as far as a thread that ticks steadily can tell.

    A process that was stopped, or a machine too busy to run it, has seen nothing of the others in that time. Between
    two ticks the clock therefore advances by at most `most`.

    Args:
        most: seconds between two ticks that count; longer gaps count as much.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._ticked, self._before = time.monotonic(), 0.0
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Say that this process runs."""
        with self._lock:
            now = time.monotonic()
            self._before += min(now - self._ticked, self.most)
            self._ticked = now

    def now(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            return self._before + min(time.monotonic() - self._ticked, self.most)
