"""The command: python -m tests.fuzz.frameworks --help."""

from __future__ import annotations

import argparse
import importlib.util
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.fuzz.frameworks.serve import PACKAGES, module_of, prepare, run
from tests.fuzz.frameworks.tally import TOLD, Tally

ROUND = 150
"""Draws that are put in the order of their groups of ranks at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the draws that the arguments name; 1 if one of them is not right or refused."""
    asked = _parser().parse_args(arguments)
    about = {"seed": asked.seed, "first": asked.first, "only": asked.only, "torch": torch.__version__}
    began, tally = time.monotonic(), Tally()
    deadline = began + (asked.seconds or math.inf)

    def tell() -> None:
        tally.seconds = time.monotonic() - began
        if asked.out:
            tally.write(asked.out, **about)

    prepare(*asked.only)
    numbers = range(asked.first, asked.first + asked.cases) if asked.case is None else range(asked.case, asked.case + 1)
    try:
        for start in range(numbers.start, numbers.stop, ROUND):
            for framework in asked.only:
                some = range(start, min(start + ROUND, numbers.stop))
                draws = [module_of(framework).draw(asked.seed, number) for number in some]
                if asked.case is not None:
                    print(*draws, sep="\n")
                for draw, outcome in run(framework, draws, asked.limit, deadline):
                    tally.add(framework, draw, outcome)
                    if outcome.kind not in ("right", "refused") and len(tally.failures) <= TOLD:
                        print(f"{outcome.kind.upper()} {draw.line}\n{outcome.reason}", flush=True)
                tell()
                print(tally.head(), flush=True)
    except KeyboardInterrupt:
        print("interrupted; what has been counted so far:")
    tell()
    print(tally.text())
    return 1 if tally.failures or not any(counts["right"] for counts in tally.kinds.values()) else 0


def _parser() -> argparse.ArgumentParser:
    installed = [name for name in PACKAGES if importlib.util.find_spec(name)]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.frameworks", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--cases", type=int, default=100, help="how many of each framework")
    parser.add_argument("--case", type=int, help="this one alone, as a failure's line says")
    parser.add_argument("--only", choices=installed, nargs="+", default=installed, help="frameworks; all installed")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no draws after so many; 0 for no end")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a draw has failed to end")
    parser.add_argument("--out", type=Path, help="write the counts and the failures as JSON")
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its counts are told as after ^C
    sys.exit(main())
