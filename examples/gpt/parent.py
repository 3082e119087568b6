"""End a rank when its parent torchrun ends, so that no rank trains on after its launcher was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER = "DFA_EXAMPLE_LAUNCHER"
"""The environment variable that tells the ranks the process id of the process that started torchrun."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: set the signal that the kernel sends when the parent ends, also to a stopped process."""


def end_with_parent() -> None:
    """Arrange that this rank is killed when its torchrun ends for any reason; return at once."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # another launcher may end before its ranks
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != int(os.environ.get(LAUNCHER, parent)):  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
