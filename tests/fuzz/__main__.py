"""The command: python -m tests.fuzz --help."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import math
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from tests.fuzz.attempt import attempt
from tests.fuzz.frameworks import steps
from tests.fuzz.outcome import TOLD, Draw, Outcome, Tally
from tests.fuzz.random_case import GPU_CLASSES, MOST_RANKS, Case, draw
from tests.fuzz.serve import run_all, within
from tests.support.workers import preload

ATTENTION = ("together", "gloo", "nccl")
GROUPS = 4
"""Groups of ranks that share the GPUs over NCCL."""
TELL = 5.0
"""Seconds between two lines of progress, and between two writings of the report."""
ROUND = 150
"""Steps of a framework that are put in the order of their groups of ranks at a time."""

Outcomes = Iterator[tuple[Draw, Outcome]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the draws that the arguments name; 1 if one of them is not right or refused."""
    asked = _parser().parse_args(arguments)
    installed = [name for name in steps.PACKAGES if importlib.util.find_spec(name)]
    over = [name for one in asked.over for name in (installed if one == "frameworks" else [one])]
    began = told = time.monotonic()
    tally = Tally()

    def tell() -> None:
        tally.seconds = time.monotonic() - began
        if asked.out:
            tally.write(asked.out, seed=asked.seed, first=asked.first, over=over, device=asked.device)

    preload("tests.fuzz.attempt")
    steps.prepare(*(name for name in over if name not in ATTENTION))
    try:
        for drawn, outcome in _run_each(over, asked, began + (asked.seconds or math.inf)):
            tally.add(drawn, outcome)
            if asked.case is not None:
                print(drawn)
            if outcome.kind not in ("right", "refused", "unfinished") and len(tally.failures) <= TOLD:
                print(f"{outcome.kind.upper()} {drawn.line}\n{outcome.reason}", flush=True)
            if time.monotonic() > told + TELL:
                told = time.monotonic()
                tell()
                print(tally.head(), flush=True)
    except KeyboardInterrupt:
        print("interrupted; what has been counted so far:")
    tell()
    print(tally.text())
    return 0 if tally.succeeded else 1


def _run_each(over: Sequence[str], asked: argparse.Namespace, deadline: float) -> Outcomes:
    first, cases = (asked.first, asked.cases) if asked.case is None else (asked.case, 1)
    numbers = range(first, first + cases)
    for name in over:
        if name in ATTENTION:
            yield from _attentions(name, numbers, asked, deadline)
        else:
            for at in range(0, len(numbers), ROUND):
                draws = [steps.module_of(name).draw(asked.seed, number) for number in numbers[at : at + ROUND]]
                yield from steps.run(name, draws, asked.limit or 60.0, deadline)


def _attentions(over: str, numbers: range, asked: argparse.Namespace, deadline: float) -> Outcomes:
    device, ranks = asked.device, asked.ranks
    if over == "nccl":
        device, ranks = "cuda", ranks or [max(2, torch.cuda.device_count())]
    cuda = device != "cpu"
    limit = asked.limit or (300.0 if cuda else 120.0)
    drawn = functools.partial(draw, asked.seed, over=over, device=device, ranks=ranks)
    usual = {"together": len(GPU_CLASSES) if cuda else 0, "nccl": GROUPS}
    jobs = asked.jobs if asked.jobs is not None else usual.get(over, 1)
    if over == "together" and not (jobs and asked.case is None):
        yield from run_here(map(drawn, numbers), limit, deadline)
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        if over == "together":
            yield from run_jobs([drawn(number) for number in numbers], jobs, 1, folder, limit, deadline, cuda=cuda)
            return
        by_ranks: dict[int, list[Case]] = {}
        for case in map(drawn, numbers):
            by_ranks.setdefault(case.ranks, []).append(case)
        for count, cases in by_ranks.items():
            if jobs > 1:
                yield from run_jobs(cases, jobs, count, folder, limit, deadline, cuda=cuda)
            else:  # in this thread, which ends the ranks when it is interrupted
                yield from run_all(attempt, cases, count, folder, limit, deadline, cuda=cuda)


def run_here(cases: Iterable[Case], limit: float, deadline: float) -> Outcomes:
    """Run one case after another in this process, which ends if one does not end."""
    for case in cases:
        if time.monotonic() > deadline:
            return
        with within(limit, case.line):
            yield case, attempt(case)


def run_jobs(
    cases: Sequence[Case], jobs: int, ranks: int, folder: str, limit: float, deadline: float, *, cuda: bool = False
) -> Outcomes:
    """Run cases in groups of processes side by side: job j has every jobs-th case from j on, which need few kernels."""
    found: queue.Queue[tuple[Draw, Outcome] | None] = queue.Queue()

    def work(mine: Sequence[Case]) -> None:
        try:
            for one in run_all(attempt, mine, ranks, folder, limit, deadline, cuda=cuda):
                found.put(one)
        finally:
            found.put(None)

    threads = [threading.Thread(target=work, args=(cases[job::jobs],), daemon=True) for job in range(jobs)]
    for thread in threads:
        thread.start()
    left = jobs
    while left:
        if (one := found.get()) is None:
            left -= 1
        else:
            yield one


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    about = "attentions with all ranks in one process, or with a process for each; steps of frameworks"
    kinds = (*ATTENTION, *steps.PACKAGES, "frameworks")
    parser.add_argument("--over", choices=kinds, nargs="+", default=["together"], help=about)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, default=300, help="how many, over each")
    parser.add_argument("--case", type=int, help="this one alone, as a failure's line says")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU plays all ranks; always over nccl"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help=f"numbers to draw from; all to {MOST_RANKS}")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no case after so many; 0 for no end")
    about = "seconds after which a case has failed to end; 120, on a GPU, where kernels are compiled, 300; a step 60"
    parser.add_argument("--limit", type=float, help=about)
    about = "groups of ranks side by side; 0 for `together`, the default on CPU: this process"
    parser.add_argument("--jobs", type=int, help=about)
    parser.add_argument("--out", type=Path, help="write the counts and the failures as JSON")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its counts are told as after ^C
    if "--case" not in sys.argv:
        logging.getLogger("dfa_megatron").setLevel(logging.ERROR)  # a line for each kernel that is chosen
    sys.exit(main())
