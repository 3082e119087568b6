"""A rank that comes back in time, or is out of memory where no other rank takes part, goes on exactly."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.faults.training import PAUSE, RANKS, WRITING, Fault, Run, recorded, run_training

PAUSED = "SIGSTOP, SIGCONT"
RUNS = (
    (
        Fault(PAUSED, "agreement", 0, step=0),
        Fault(PAUSED, "forward", 1, step=1),
        Fault(PAUSED, "backward", 2, step=2),
        Fault(PAUSED, "optimizer", 0, step=3),
        Fault(PAUSED, "checkpoint", 1, step=4),
        Fault("slow", "checkpoint", 2, step=6),
    ),
    (
        Fault("out of memory", "agreement", 2, step=0),
        Fault("out of memory", "optimizer", 1, step=1),
        Fault("out of memory", "checkpoint", 0, step=2),
    ),
)
TEXTS = {
    PAUSED: (f"SIGSTOP, and SIGCONT after {PAUSE:g} s", "goes on exactly"),
    "slow": (
        f"takes {WRITING:g} s, longer than a quarter of the timeout",
        "goes on exactly: a living rank is waited for",
    ),
    "out of memory": ("out of memory, caught, and tried again", "goes on exactly"),
}


@functools.cache
def ran(faults: tuple[Fault, ...]) -> Run:
    return run_training(faults, steps=8, together=True)


@pytest.mark.fault
@pytest.mark.parametrize("fault", [f for faults in RUNS for f in faults], ids=str)
def test_a_rank_that_comes_back_goes_on_exactly(fault: Fault, record_property: Any) -> None:
    found = ran(next(faults for faults in RUNS if fault in faults))
    assert str(fault) in found.struck, [seen.lines for seen in found.ranks]
    struck = found.struck[str(fault)]
    went_on = []
    for rank in range(RANKS):
        seen = found.ranks[rank]
        assert (seen.error, seen.status) == ("", 0)
        assert [line["step"] for line in seen.steps] == list(range(8))
        assert all(line["exact"] for line in seen.steps)
        went_on.append(next(line["at"] for line in seen.steps if line["at"] > struck))
        if (fault.kind, fault.where) == ("out of memory", "agreement"):
            told = next(line["caught"] for line in seen.lines if "caught" in line)
            assert "out of memory in this test" in told, "every rank is told, so that all may try again"
    injected, happens = TEXTS[fault.kind]
    happens += " where all ranks try again" if "caught" in injected and not fault.step else ""
    record_property("fault", recorded(injected, fault.where, fault.rank, happens, max(went_on) - struck))
