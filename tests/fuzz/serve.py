"""Run draws over processes that stay for many of them, and new ones after a draw that was lost with its processes.

A draw that does not end is a failure: its process says where it hangs, and ends.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz.outcome import Draw, Outcome
from tests.support.workers import run_ranks

HUNG = 3
"""The exit status of a process whose case did not end."""

Attempt = Callable[[Any, int, int, str], Outcome]
"""Runs a draw on a rank: of (the draw, rank, ranks, a folder that all ranks see)."""

DRAWS_OF_A_GROUP = 100
"""Draws that one group of processes runs, unless one of them loses it."""
GRACE = 15.0
"""Seconds after the deadline until a draw that goes on, in a compilation perhaps, is cut off."""


def run_all(
    attempt: Attempt, draws: Sequence[Draw], ranks: int, folder: str, limit: float, deadline: float = math.inf, *,
    cuda: bool = False,
) -> Iterator[tuple[Draw, Outcome]]:  # fmt: skip
    """Yield the outcomes of these draws in order, from as many groups of processes as it takes.

    Args:
        attempt: it is pickled.
        limit: seconds for a draw.
        deadline: on the monotonic clock. No draw begins after it, and `GRACE` later the last one is "unfinished".
    """
    at = 0
    while at < len(draws) and time.monotonic() < deadline:
        done = _run_group(attempt, draws[at : at + DRAWS_OF_A_GROUP], ranks, folder, limit, deadline, cuda)
        yield from done
        at += len(done)
        if not done or done[-1][1].kind == "unfinished":
            return


def _run_group(
    attempt: Attempt, draws: Sequence[Draw], ranks: int, folder: str, limit: float, deadline: float, cuda: bool
) -> list[tuple[Draw, Outcome]]:
    """Return the outcomes of these draws in order, up to the one that lost the group, if one did."""
    lost, done = "", list[tuple[Draw, Outcome]]()
    with tempfile.TemporaryDirectory(prefix="group-", dir=folder) as reports:
        left = deadline - time.monotonic()
        timeout = min(60 + limit * len(draws), left + GRACE)
        try:
            until = time.time() + left
            run_ranks(ranks, _serve, attempt, draws, folder, reports, limit, until, timeout=timeout, cuda=cuda)
        except AssertionError as error:
            lost = str(error)
        told = [_read(Path(reports, str(rank))) for rank in range(ranks)]
    for draw in draws:
        known = [outcomes[draw.number] for outcomes in told if draw.number in outcomes]
        reasons = [outcome.reason for outcome in known if outcome.kind == "failed"]
        own = [reason for reason in reasons if "onnection" not in reason]  # the others met a rank that had ended
        if len(known) < ranks and not own and time.monotonic() > deadline:
            return [*done, (draw, Outcome(draw.number, "unfinished"))] if lost else done
        if len(known) < ranks or reasons:
            kind = "hung" if f"exit code {HUNG}" in lost and not own else "failed"
            return [*done, (draw, Outcome(draw.number, kind, (own or reasons or [lost[-6000:]])[0]))]
        done.append((draw, _of_all(draw, known)))
        if done[-1][1].kind == "failed":  # ranks that differ have parted
            break
    return done


def _of_all(draw: Draw, known: Sequence[Outcome]) -> Outcome:
    """Return one outcome of all ranks: the same refusal on each, or the worst."""
    refused = {outcome.reason for outcome in known if outcome.kind == "refused"}
    if refused and (len(refused) > 1 or any(outcome.kind != "refused" for outcome in known)):
        said = "; ".join(f"rank {rank}: {o.kind} {o.reason}" for rank, o in enumerate(known))
        return Outcome(draw.number, "failed", f"ranks differ: {said}")
    return max(known, key=lambda outcome: (outcome.kind == "wrong", outcome.worst))


def _read(report: Path) -> dict[int, Outcome]:
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return {outcome.number: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}


def _serve(
    rank: int, ranks: int, attempt: Attempt, draws: Sequence[Draw], folder: str, reports: str, limit: float,
    until: float,
) -> None:  # fmt: skip
    """Run the draws on a rank in order, each outcome a line of a file, until one has lost the group."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # whoever sets the level of a logger later
    with Path(reports, str(rank)).open("w", encoding="utf-8", buffering=1) as report:
        for draw in draws:
            over = torch.tensor(int(time.time() > until))  # on the CPU: gloo
            dist.broadcast(over, 0)
            if over:
                return
            with within(limit, draw.line):
                outcome = attempt(draw, rank, ranks, folder)
                report.write(json.dumps(asdict(outcome)) + "\n")
                if outcome.kind == "failed":
                    raise RuntimeError(f"{draw.line} failed: {outcome.reason}")  # the others may be waiting
                dist.barrier()  # a refusal of one rank alone must not meet the next draw of another


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
