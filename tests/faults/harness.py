"""Start the ranks of a training with faults, wait until they have ended by themselves, and read what they wrote."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.faults.training import RANKS, Fault, train
from tests.support.workers import _jobs, _Worker

LIMIT = 25.0
"""Seconds in which all ranks must have ended that a fault has not stopped."""


@dataclass
class Seen:
    """What became of one rank: its lines, its exit status, None where it had to be ended, and when it ended."""

    lines: list[dict[str, Any]]
    status: int | None
    ended: float

    @property
    def error(self) -> str:
        return next((f"{line['error']}: {line['text']}" for line in self.lines if "error" in line), "")

    @property
    def errs(self) -> float:
        """When the error came."""
        return next(line["at"] for line in self.lines if "error" in line)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]


@dataclass
class Run:
    """A whole run, by rank."""

    ranks: list[Seen]
    struck: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for seen in self.ranks:
            self.struck |= {line["fault"]: line["at"] for line in seen.lines if "fault" in line}


def recorded(fault: str, where: str, rank: int | None, happens: str, seconds: float | None = None) -> dict[str, Any]:
    """What docs/trust.md says of a test."""
    rounded = None if seconds is None else round(seconds, 1)
    about = {"fault": fault, "where": where, "rank": rank, "happens": happens}
    return about | {"seconds": rounded, "transport": "gloo"}


def run(faults: tuple[Fault, ...], steps: int = 4, *, together: bool = False) -> Run:
    """Train with these faults; a rank that is stopped for good is ended once the others have ended, as launchers do."""
    stopped = {fault.rank for fault in faults if fault.kind == "SIGSTOP"}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        workers: list[Any] = []
        try:
            for job in _jobs(RANKS, train, (faults, steps, folder, together), 60.0, False, folder):
                workers.append(_Worker(job, folder))
            ended = _wait({w.process.sentinel: w.rank for w in workers if w.rank not in stopped})
            statuses = [worker.process.exitcode for worker in workers]
            lines = [_lines(Path(folder, f"rank{rank}")) for rank in range(RANKS)]
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()
    return Run([Seen(lines[rank], statuses[rank], ended.get(rank, 0.0)) for rank in range(RANKS)])


def _wait(sentinels: dict[int, int]) -> dict[int, float]:
    ended: dict[int, float] = {}
    deadline = time.monotonic() + LIMIT
    while sentinels and (ready := wait(list(sentinels), max(0.0, deadline - time.monotonic()))):
        ended |= {sentinels.pop(sentinel): time.time() for sentinel in ready}  # type: ignore[call-overload]
    return ended


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
