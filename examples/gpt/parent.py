"""Ends a rank when torchrun, its parent, is gone: a launcher that was killed leaves no rank training."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER = "DFA_EXAMPLE_LAUNCHER"
"""Where the process that started torchrun leaves its process id for its ranks."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that the kernel sends when the parent ends; it reaches a stopped process as well."""


def end_with_parent() -> None:
    """Have this rank killed when the torchrun that started it ends in whatever way; returns at once."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # some other launcher, whose process may rightly end before its ranks
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != int(os.environ.get(LAUNCHER, parent)):  # it had ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
