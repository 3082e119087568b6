"""A case that does not end is a failure: the process says where it hangs, and ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HUNG = 3
"""The exit status of a process whose case did not end."""


@contextmanager
def within(seconds: float, line: str) -> Iterator[None]:
    """End this process unless what is inside ends in that time; `line` says what it was."""

    def end() -> None:
        print(f"no end within {seconds:g} s: {line}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(HUNG)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
