"""The command: python -m dfa_megatron.testing.fuzz --help."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dfa_megatron.testing.fuzz.attempt import Verdict, attempt
from dfa_megatron.testing.fuzz.draw import MOST_RANKS, Case, draw
from dfa_megatron.testing.fuzz.groups import run_groups
from dfa_megatron.testing.fuzz.summary import Summary
from dfa_megatron.testing.fuzz.watch import within


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments name; 1 if one of them failed."""
    asked = _parser().parse_args(arguments)
    numbers = [asked.case] if asked.case is not None else range(asked.first, asked.first + asked.cases)
    began = time.monotonic()
    deadline = began + (asked.seconds or math.inf)
    summary = Summary()
    try:
        for over in asked.over:
            cases = (draw(asked.seed, number, over, asked.device, asked.ranks) for number in numbers)
            for case, verdict in _run(over, cases, asked.limit, deadline):
                if asked.case is not None:
                    print(case)
                if verdict.kind == "failed":
                    print(f"FAILED {case.line}\n{verdict.reason}", flush=True)
                summary.add(case, verdict)
    except KeyboardInterrupt:
        print("interrupted; what has been counted so far:")
    summary.seconds = time.monotonic() - began
    print(summary.text())
    if asked.out:
        about = {"seed": asked.seed, "first": asked.first, "over": asked.over, "device": asked.device}
        summary.write(asked.out, **about, torch=torch.__version__)
    return 1 if summary.failures or not summary.kinds["right"] + summary.kinds["refused"] else 0


def _run(over: str, cases: Iterator[Case], limit: float, deadline: float) -> Iterator[tuple[Case, Verdict]]:
    if over != "together":
        yield from run_groups(list(cases), limit, deadline)
        return
    for case in cases:
        if time.monotonic() > deadline:
            return
        with within(limit, case.line):
            verdict = attempt(case)
        yield case, verdict


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dfa_megatron.testing.fuzz", description=__doc__)
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
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a case has failed to end")
    parser.add_argument("--out", type=Path, help="write the counts and the failures as JSON")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
