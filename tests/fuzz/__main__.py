"""The command: python -m tests.fuzz --help."""

from __future__ import annotations

import argparse
import functools
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.fuzz.attempt import Verdict, attempts
from tests.fuzz.in_one_process import run_jobs
from tests.fuzz.over_ranks import run_groups
from tests.fuzz.random_case import GPU_CLASSES, MOST_RANKS, Case, draw
from tests.fuzz.summary import TOLD, Summary

TELL = 5.0
"""Seconds between two lines of progress, and between two writings of the report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments name; 1 if one of them failed."""
    asked = _parser().parse_args(arguments)
    about = {"seed": asked.seed, "first": asked.first, "over": asked.over, "device": asked.device}
    began = told = time.monotonic()
    summary = Summary()

    def write() -> None:
        summary.seconds = time.monotonic() - began
        if asked.out:
            summary.write(asked.out, **about, torch=torch.__version__)

    try:
        for over in asked.over:
            for case, verdict in _run(over, asked, began + (asked.seconds or math.inf)):
                summary.add(case, verdict)
                if asked.case is not None:
                    print(case)
                if verdict.kind == "failed" and len(summary.failures) <= TOLD:
                    print(f"FAILED {case.line}\n{verdict.reason}", flush=True)
                if time.monotonic() > told + TELL:
                    told = time.monotonic()
                    write()
                    print(summary.head(), flush=True)
    except KeyboardInterrupt:
        print("interrupted; what has been counted so far:")
    write()
    print(summary.text())
    return 1 if summary.failures or not summary.kinds["right"] + summary.kinds["refused"] else 0


def _run(over: str, asked: argparse.Namespace, deadline: float) -> Iterator[tuple[Case, Verdict]]:
    numbers = range(asked.first, asked.first + asked.cases) if asked.case is None else range(asked.case, asked.case + 1)
    limit = asked.limit or (120.0 if asked.device == "cpu" else 300.0)
    jobs = asked.jobs if asked.jobs is not None else 0 if asked.device == "cpu" else len(GPU_CLASSES)
    drawn = functools.partial(draw, asked.seed, over=over, device=asked.device, ranks=asked.ranks)
    if over != "together":
        yield from run_groups([drawn(number) for number in numbers], limit, deadline)
    elif jobs and asked.case is None:
        yield from run_jobs(drawn, numbers, jobs, limit, deadline)
    else:
        yield from attempts(drawn, numbers, limit, deadline)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, default=300, help="how many, over each kind of ranks")
    parser.add_argument("--case", type=int, help="this one alone, as a failure's line says")
    kinds = ("together", "gloo", "nccl")
    about = "together: all ranks in one process; gloo, nccl: a process for each"
    parser.add_argument("--over", choices=kinds, nargs="+", default=["together"], help=about)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU plays all ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help=f"numbers to draw from; all to {MOST_RANKS}")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no case after so many; 0 for no end")
    about = "seconds after which a case has failed to end; 120, and on a GPU, where kernels are compiled, 300"
    parser.add_argument("--limit", type=float, help=about)
    about = "processes for `together`; 0, the default on CPU: this one; on a GPU as many as there are shapes"
    parser.add_argument("--jobs", type=int, help=about)
    parser.add_argument("--out", type=Path, help="write the counts and the failures as JSON")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its counts are told as after ^C
    if "--case" not in sys.argv:
        logging.getLogger("dfa_megatron").setLevel(logging.ERROR)  # a line for each kernel that is chosen
    sys.exit(main())
