"""The options by which the calls of a group are compared and watched."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guard:
    """How the calls of a group are compared and watched.

    verify: compare every call, and run a watcher. agreement_timeout, stall_timeout: seconds; 0 for the second is none.
    """

    verify: bool = True
    agreement_timeout: float = 120.0
    stall_timeout: float = 1800.0

    @classmethod
    def of(cls, verify: object, agreement_timeout: object, stall_timeout: object) -> Guard:
        """Build a guard from unchecked options; a wrong value gives the default.

        A rank that refuses an option has to tell the other ranks so, and needs a timeout for that.
        """
        patience = _seconds(agreement_timeout, _DEFAULT.agreement_timeout)
        stall = 0.0 if stall_timeout == 0 else _seconds(stall_timeout, _DEFAULT.stall_timeout)
        return cls(verify != "off", patience, stall)


_DEFAULT = Guard()


def _seconds(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else default
