"""Plan while Python's garbage collector pauses.

A plan of a pack makes tens of thousands of objects and no cycles. The collector would look through all objects of the
training several times meanwhile, and find nothing.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_resumes = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the collector pause in all threads; it goes on when the last block ends, unless it was off before."""
    global _inside, _resumes
    with _lock:
        if _inside == 0:
            _resumes = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _resumes:
                gc.enable()


def _in_a_fork() -> None:
    """Go on in a process that was forked meanwhile: the threads that were inside are not there."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _resumes:
        gc.enable()
    _inside = 0


os.register_at_fork(after_in_child=_in_a_fork)
