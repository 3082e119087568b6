"""The options by which the calls of a group are compared and watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guard:
    """How the calls of a group are compared and watched.

    verify: compare every call, and run a watcher. agreement_timeout, stall_timeout: seconds; 0 for the second is none.
    """

    verify: bool = True
    agreement_timeout: float = 120.0
    stall_timeout: float = 1800.0
