"""Time the programs of P ranks over a pack on one GPU, one after another, beside the kernel alone on the whole pack.

    python -m benchmarks.pack_programs --ranks 2 4 8 --out pack_programs.json
    python -m benchmarks.pack_programs --device cpu --kernel cpu --tokens-per-rank 256 --heads 4 --head-dim 16

Messages go nowhere and rows of other ranks are noise, so only times mean something; a test runs the same programs and
compares their numbers. The bound is the kernel's own time over the pack, divided by P. `new pack` is the host's time to
plan a pack that was not seen before, for one rank, checked and lowered; then its first calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.documents import Offsets, draw_documents, lengths_of
from dfa_megatron import DistAttentionConfig
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.kernels.api import BlockCall, BlockKernel, Saved
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import CAUSAL, Segment
from dfa_megatron.runtime.prepare import Prepared, build
from dfa_megatron.runtime.problem import Inputs
from dfa_megatron.runtime.request import Request
from dfa_megatron.runtime.run import run_backward, run_forward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shapes:
    """What is timed."""

    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "where", choices=("cuda", "cpu"))
    kernel: str = flag("auto", "as in the options")
    ranks: tuple[int, ...] = flag((2, 4, 8), "of the programs")
    tokens_per_rank: int = flag(8192, "of the pack")
    heads: int = flag(64, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    mean: float = flag(7.0, "of the logarithm of a document's tokens")
    sigma: float = flag(1.2, "of the same")
    lengths: Path | None = flag(None, "a histogram of lengths in place of these two, see benchmarks/documents.py")
    layout: str = flag("contiguous", "of the tokens", choices=("contiguous", "zigzag", "load_balanced"))
    seed: int = flag(0, "of the documents")
    repetitions: int = flag(20, "calls of a time")
    out: Path | None = flag(None, "write the rows as JSON")


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Shapes)
    shapes = from_flags(Shapes, parser.parse_args())
    rows = []
    with torch.no_grad():
        for ranks in shapes.ranks:
            rows.append(measure(shapes, ranks))
            print("  ".join(f"{key} {value:.3f}" for key, value in rows[-1].items() if isinstance(value, int | float)))
    write(shapes, rows)


def write(shapes: Shapes, rows: list[dict[str, Any]]) -> None:
    """Write the rows as JSON, with the arguments but the file's own path, if that was asked for."""
    if shapes.out:
        given = {name: str(value) for name, value in vars(shapes).items() if name != "out"}
        shapes.out.write_text(
            json.dumps({"arguments": given, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


def measure(shapes: Shapes, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of the kernel alone and of every rank's program, and the share of the bound."""
    offsets = drawn(shapes, ranks, shapes.seed)
    kernel = program(shapes, offsets, ranks, 0)[0].kernel
    bound = milliseconds(kernel_alone(shapes, offsets, kernel), shapes) / ranks
    programs = [milliseconds(both_phases(*program(shapes, offsets, ranks, rank)), shapes) for rank in range(ranks)]
    pairs = sum((n * n + n) / 2 for n in (hi - lo for lo, hi in pairwise(offsets)))
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
        **new_packs(shapes, ranks),
        "programs ms": programs,
        "cu_seqlens": offsets,
    }


def new_packs(shapes: Shapes, ranks: int) -> dict[str, float]:
    """Return what new packs take on the host, medians of milliseconds; others came before, as in training.

    A plan, then two calls of a forward and backward: recorded, and replayed as all later ones are.
    """
    given = draw(shapes, shapes.tokens_per_rank)
    found: dict[str, list[float]] = {"new pack ms": [], "recorded ms": [], "replayed ms": []}
    for number in range(1, 1 + shapes.repetitions):
        request = requested(shapes, drawn(shapes, ranks, shapes.seed + number))
        start = time.perf_counter()
        prepared = build(request, ranks, number % ranks, Inputs(*given[:3]))
        found["new pack ms"].append(1e3 * (time.perf_counter() - start))
        both = both_phases(prepared, given)
        for name in ("recorded ms", "replayed ms"):
            synchronize(shapes)
            start = time.perf_counter()
            both()
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in found.items()}


def drawn(shapes: Shapes, ranks: int, seed: int) -> Offsets:
    """Return the documents of a pack."""
    lengths = lengths_of(shapes.mean, shapes.sigma, shapes.lengths)
    return draw_documents(ranks * shapes.tokens_per_rank, 2 * ranks, seed, lengths)


def draw(shapes: Shapes, tokens: int) -> Tensors:
    """Return q, k, v and dout."""
    dtype = torch.bfloat16 if shapes.device == "cuda" else torch.float32
    heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
    q, k, v, dout = (torch.randn(1, tokens, h, shapes.head_dim, device=shapes.device, dtype=dtype) for h in heads)
    return q, k, v, dout


def requested(shapes: Shapes, offsets: Offsets) -> Request:
    """Return what is asked for over a pack."""
    config = DistAttentionConfig(kernel=shapes.kernel, ulysses_degree=1)
    scale = shapes.head_dim**-0.5
    return Request(softmax_scale=scale, causal=True, layout=shapes.layout, cu_seqlens=offsets, config=config)


def program(shapes: Shapes, offsets: Offsets, ranks: int, rank: int) -> tuple[Prepared, Tensors]:
    """Return one rank's prepared attention, with a transport that moves nothing, and its tensors."""
    q, k, v, dout = draw(shapes, shapes.tokens_per_rank)
    return build(requested(shapes, offsets), ranks, rank, Inputs(q, k, v)), (q, k, v, dout)


def both_phases(prepared: Prepared, given: Tensors) -> Callable[[], object]:
    """Return a forward and backward of a program."""
    q, k, v, dout = given

    def call() -> object:
        out, lse = run_forward(prepared, Inputs(q, k, v))
        return run_backward(prepared, dout, (q, k, v, out, lse, None, None))

    return call


def kernel_alone(shapes: Shapes, offsets: Offsets, kernel: BlockKernel) -> Callable[[], object]:
    """Return a forward and backward of the kernel over the whole pack in one launch each."""
    q, k, v, dout = draw(shapes, offsets[-1])
    parts = tuple(Segment(lo, hi, lo, hi, CAUSAL) for lo, hi in pairwise(offsets))
    segments = Segments(parts, offsets[-1], offsets[-1])
    block = BlockCall(q, k, v, segments, shapes.head_dim**-0.5)

    def call() -> object:
        out, lse = kernel.forward(block)
        takes_out = kernel.takes_out or kernel.backward_needs == "out"
        saved = Saved(lse, out=out) if takes_out else Saved(lse, minus_delta(dout, out))
        return kernel.backward(block, dout, saved)

    return call


def milliseconds(call: Callable[[], object], shapes: Shapes) -> float:
    """Return the milliseconds of one of many calls in a row, which hide the host where it is quick enough."""
    for _ in range(4):
        call()
    synchronize(shapes)
    start = time.perf_counter()
    for _ in range(shapes.repetitions):
        call()
    synchronize(shapes)
    return 1e3 * (time.perf_counter() - start) / shapes.repetitions


def synchronize(shapes: Shapes) -> None:
    """Wait for the device."""
    if shapes.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
