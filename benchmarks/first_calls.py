"""Time the first calls of many packs whose documents end anywhere: where kernels are compiled for a pack, they stall.

    TRITON_CACHE_DIR=$(mktemp -d) python -m benchmarks.first_calls --ranks 4 8 --out first_calls.json
    python -m benchmarks.first_calls --device cpu --kernel cpu --tokens-per-rank 64 --heads 2 --head-dim 16 --packs 4

Each pack's first forward and backward of one rank, with a transport that moves nothing. The seconds include what
flash-attn-4 and Triton compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.documents import draw_documents, lengths_of
from benchmarks.pack_programs import Shapes, both_phases, draw, requested, synchronize, write
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.runtime.prepare import build
from dfa_megatron.runtime.problem import Inputs

STALL = 60.0
"""Milliseconds from which on a first call counts as stalled: more than recording takes, less than compiling."""


@dataclass(frozen=True)
class Packs(Shapes):
    """What is timed."""

    packs: int = flag(80, "of each number of ranks")


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Packs)
    shapes = from_flags(Packs, parser.parse_args())
    with torch.no_grad():
        rows = [measure(shapes, ranks) for ranks in shapes.ranks]
    write(shapes, rows)


def measure(shapes: Packs, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of each pack's first call, and what they come to; print it."""
    given, first = draw(shapes, shapes.tokens_per_rank), list[float]()
    lengths = lengths_of(shapes.mean, shapes.sigma, shapes.lengths)
    for number in range(shapes.packs):
        offsets = draw_documents(ranks * shapes.tokens_per_rank, 1, shapes.seed + number, lengths)
        call = both_phases(build(requested(shapes, offsets), ranks, number % ranks, Inputs(*given[:3])), given)
        synchronize(shapes)
        start = time.perf_counter()
        call()
        first.append(round(1e3 * (time.perf_counter() - start), 2))
    stalled = [ms for ms in first if ms > STALL]
    found = {"ranks": ranks, "median ms": statistics.median(first), "stalled": len(stalled), "stalled ms": sum(stalled)}
    print("  ".join(f"{key} {value:.2f}" for key, value in found.items()), flush=True)
    return {**found, "first calls ms": first}


if __name__ == "__main__":
    main()
