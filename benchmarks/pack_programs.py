"""Time the programs of P ranks over a pack on one GPU, one after another, beside the kernel alone on the whole pack.

    python -m benchmarks.pack_programs --ranks 2 4 8 --out pack_programs.json
    python -m benchmarks.pack_programs --device cpu --kernel cpu --tokens-per-rank 256 --heads 4 --head-dim 16

Messages go nowhere and rows of other ranks are noise, so only times mean something; a test runs the same programs and
compares their numbers. The bound is the kernel's own time over the pack, divided by P. `new pack` is the host's time to
plan a pack that was not seen before, for one rank, checked and lowered; then its first calls.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.attention.method import saved_for
from benchmarks.bench import Call, benchmark, dtype_on, flags_of, wait
from benchmarks.documents import Offsets, PackShapes
from benchmarks.programs import Tensors, both_phases, draw, prepare
from dfa_megatron import masks
from dfa_megatron.doctor.world import stopwatch
from dfa_megatron.flags import flag
from dfa_megatron.kernels.api import BlockCall, BlockKernel
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import CAUSAL, Segment
from dfa_megatron.runtime.prepare import Prepared


@dataclass(frozen=True)
class Shapes(PackShapes):
    """What is timed."""

    kernel: str = flag("auto", "as in the options")
    ranks: tuple[int, ...] = flag((2, 4, 8), "of the programs")
    layout: str = flag("contiguous", "of the tokens", choices=("contiguous", "zigzag", "load_balanced"))

    def prepare(self, given: Tensors, offsets: Offsets, ranks: int, rank: int) -> Prepared:
        """Return a rank's attention over a pack."""
        return prepare(given, ranks, rank, self.kernel, layout=self.layout, cu_seqlens=offsets)


def main() -> None:
    """Time, print and write."""
    shapes = flags_of(Shapes, __doc__)
    with benchmark(shapes) as (world, report):
        for ranks in shapes.ranks:
            report.add(measure(shapes, ranks, world.device))


def measure(shapes: Shapes, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of the kernel alone and of every rank's program, and the share of the bound."""

    def inputs(tokens: int) -> Tensors:
        sizes = shapes.heads, shapes.kv_heads, shapes.head_dim
        return draw(tokens, *sizes, dtype=dtype_on(device), device=device)

    def milliseconds(call: Call) -> float:
        """Return those of one of many calls in a row, which hide the host where it is quick enough."""
        for _ in range(4):
            call()
        wait()
        return 1e3 * stopwatch(call, device, times=shapes.repetitions)

    offsets, given = shapes.documents(ranks, shapes.seed), inputs(shapes.tokens_per_rank)
    kernel = shapes.prepare(given, offsets, ranks, 0).kernel
    bound = milliseconds(kernel_alone(inputs(offsets[-1]), offsets, kernel)) / ranks
    programs = [milliseconds(both_phases(shapes.prepare(given, offsets, ranks, rank), given)) for rank in range(ranks)]
    pairs = masks.documents([hi - lo for lo, hi in pairwise(offsets)]).area
    flops = 3.5 * 4 * pairs * shapes.heads * shapes.head_dim / ranks
    return {
        "ranks": ranks,
        "documents": len(offsets) - 1,
        "bound ms": bound,
        "slowest ms": max(programs),
        "mean ms": statistics.mean(programs),
        "share of the bound": bound / max(programs),
        "TFLOP/s": flops / max(programs) / 1e9,
        "bound TFLOP/s": flops / bound / 1e9,
        **new_packs(shapes, ranks, given),
        "programs ms": programs,
        "cu_seqlens": offsets,
    }


def new_packs(shapes: Shapes, ranks: int, given: Tensors) -> dict[str, float]:
    """Return what new packs take on the host, medians of milliseconds; others came before, as in training.

    A plan, then two calls of a forward and backward: recorded, and replayed as all later ones are.
    """
    found: dict[str, list[float]] = {"new pack ms": [], "recorded ms": [], "replayed ms": []}
    for number in range(1, 1 + shapes.repetitions):
        offsets = shapes.documents(ranks, shapes.seed + number)
        start = time.perf_counter()
        prepared = shapes.prepare(given, offsets, ranks, number % ranks)
        found["new pack ms"].append(1e3 * (time.perf_counter() - start))
        both = both_phases(prepared, given)
        for name in ("recorded ms", "replayed ms"):
            wait()
            start = time.perf_counter()
            both()
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in found.items()}


def kernel_alone(given: Tensors, offsets: Offsets, kernel: BlockKernel) -> Call:
    """Return a forward and backward of the kernel over the whole pack in one launch each."""
    q, k, v, dout = given
    parts = tuple(Segment(lo, hi, lo, hi, CAUSAL) for lo, hi in pairwise(offsets))
    block = BlockCall(q, k, v, Segments(parts, offsets[-1], offsets[-1]), q.shape[-1] ** -0.5)

    def call() -> object:
        out, lse = kernel.forward(block)
        return kernel.backward(block, dout, saved_for(kernel, dout, out, lse))

    return call


if __name__ == "__main__":
    main()
