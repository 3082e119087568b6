"""Cases over all ranks in one process, in several such processes side by side; one that is lost loses one case."""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.attempt import Verdict, attempts
from tests.fuzz.random_case import Case

GRACE = 15.0
"""Seconds after the deadline until a case that goes on, in a compilation perhaps, is cut off."""
LOST_IN_A_ROW = 5
"""Processes that a job may lose one after another without a verdict between them; then it is given up."""
MOST_RESERVED = 6 << 30
"""Bytes of GPU memory that a job keeps for its next case: the others share the GPU."""

Drawn = Callable[[int], Case]


def run_jobs(drawn: Drawn, numbers: range, jobs: int, limit: float, deadline: float) -> Iterator[tuple[Case, Verdict]]:
    """Every case, in the order in which they end: job j runs every jobs-th case from j on.

    Args:
        drawn: the case of a number; it is pickled.
        limit: seconds for a case.
        deadline: on the monotonic clock. No case begins after it, and `GRACE` later the last ones are "unfinished".
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        every = [_Job(Path(folder, str(j)), drawn, numbers[j::jobs], limit, deadline) for j in range(jobs)]
        try:
            while live := [job for job in every if job.left]:
                time.sleep(0.1)
                late = time.monotonic() > deadline + GRACE
                for job in live:
                    for verdict in job.news(late):
                        yield drawn(verdict.number), verdict
        finally:
            for job in every:
                job.end()


class _Job:
    """One process after another, until the cases are done."""

    def __init__(self, path: Path, drawn: Drawn, numbers: range, limit: float, deadline: float) -> None:
        self.left, self.lost, self.read = numbers, 0, 0
        self.path, self.drawn, self.limit, self.deadline = path, drawn, limit, deadline
        self.path.touch()
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        given = (self.path, self.drawn, self.left, self.limit, self.deadline)
        self.process = context.Process(target=_serve, args=given, daemon=True)
        self.process.start()

    def news(self, late: bool) -> list[Verdict]:
        """Return the verdicts since the last call; a process that ended too early has failed its case."""
        status = self.process.exitcode  # before reading, so that nothing is told between
        told = self._told()
        if told:
            self.left, self.lost = self.left[len(told) :], 0
        if not self.left or (status is None and not late):
            return told
        if late or (status == 0 and time.monotonic() > self.deadline):
            if status is None:
                told.append(Verdict(self.left[0], "unfinished"))
            self.left = range(0)
            self.end()
        elif status != 0:
            said = self.path.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
            told.append(Verdict(self.left[0], "failed", f"the process ended with {status}:\n{said[-4000:]}"))
            self.left, self.lost = self.left[1:], self.lost + 1
            if self.lost == LOST_IN_A_ROW:
                self.left = range(0)
        if self.left:
            self._start()
        return told

    def _told(self) -> list[Verdict]:
        with self.path.open("rb") as report:
            report.seek(self.read)
            new = report.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read += len(whole)
        return [Verdict(**json.loads(line)) for line in whole.splitlines()]

    def end(self) -> None:
        """Leave no process."""
        self.process.kill()
        self.process.join()


def _serve(path: Path, drawn: Drawn, numbers: range, limit: float, deadline: float) -> None:
    """Run the cases in order, and write each verdict as a line of the file."""
    with path.with_suffix(".err").open("w") as errors, path.open("a", encoding="utf-8", buffering=1) as report:
        os.dup2(errors.fileno(), 2)
        faulthandler.enable()
        torch.set_num_threads(1)
        logging.getLogger("dfa_megatron").setLevel(logging.ERROR)
        for case, verdict in attempts(drawn, numbers, limit, deadline):
            report.write(json.dumps(verdict.record()) + "\n")
            if case.device != "cpu" and _device_is_lost():
                os._exit(0)  # the report has all its lines; what else would run now may fail once more


def _device_is_lost() -> bool:
    """Whether an error has made the GPU useless to this process; memory that others need is given back."""
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
