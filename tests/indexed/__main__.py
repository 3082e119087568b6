"""The command: `python -m tests.indexed --cases 2000` compares so many random cases with the oracle."""

from __future__ import annotations

import argparse
import time

from tests.indexed.drawn import compare_many
from tests.support.workers import preload, run_ranks


def main() -> None:
    """Run the cases; the first that differs ends the command, with its number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    asked = parser.parse_args()
    preload("tests.indexed.drawn")
    began, each = time.monotonic(), -(-asked.cases // len(asked.ranks))
    for number, ranks in enumerate(asked.ranks):
        run_ranks(ranks, compare_many, asked.first + number * each, each, timeout=60 + 5 * each)
        print(f"{each} cases over {ranks} ranks are right ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
