"""Plan while Python's garbage collector pauses.

A plan of a pack makes tens of thousands of objects and no cycles. The collector would look through all objects of the
training several times meanwhile, and find nothing: without the pause a pack takes up to half as long again to plan.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_pauses = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the collector pause in all threads, unless it is off already."""
    global _pauses
    if not gc.isenabled():
        yield
        return
    _pauses = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _pauses = False


def _in_a_fork() -> None:
    """Go on in a process that another thread forks meanwhile: the thread that would end the pause is not there."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_in_a_fork)
