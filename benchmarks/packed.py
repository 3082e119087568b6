"""Times attention over packed documents beside others' varlen functions, after checking each against float64.

    torchrun --nproc-per-node 4 -m benchmarks.packed --heads 64 --kv-heads 8 --tokens-per-rank 8192 --out packed.json

Documents are drawn log-normal, or as --lengths says, to a quarter of the pack, and rounded to multiples of 2P tokens:
ring-flash-attn and Transformer Engine cut each into P or 2P chunks. A method that is wrong on a small pack is not
timed (ring-flash-attn's ring and zigzag are in float32: they sum into what they read). Times are of the slowest rank,
the median over repetitions in which methods take turns, each from an idle GPU; `in a row` is of one of 8 calls without
a wait between them, as a model's layers make them. TFLOP/s per rank count the pairs of the documents:
4 * pairs * heads * head_dim forward, 2.5 times that backward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.attention.baselines import ring_flash_attn, version_of
from benchmarks.attention.baselines.transformer_engine import context_parallel
from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import compared, truth_of
from benchmarks.attention.job import FLOPS_OF, Problem
from benchmarks.attention.method import Attention, Method, Split
from benchmarks.bench import Call, Report, flags_of
from benchmarks.documents import Offsets, PackShapes
from benchmarks.programs import draw, passes
from dfa_megatron import DistAttentionConfig, dist_flash_attn_varlen_func, layouts, shard_sequence
from dfa_megatron.doctor.dense import band_of
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import flag
from dfa_megatron.runtime.prepare import in_use

ROW = 8
"""Calls in a row."""
ROUNDS = 4
"""After each the file is written."""


@dataclass(frozen=True)
class Shapes(PackShapes):
    """What is timed, and how."""

    schedule: tuple[str, ...] = flag(("auto", "load_balanced"), "of ours, or a layout of tokens")
    kernel: tuple[str, ...] = flag(("auto",), "of ours")
    transport: tuple[str, ...] = flag(("auto",), "of ours")
    peers: tuple[str, ...] = flag(("p2p", "a2a"), "of Transformer Engine", choices=("p2p", "a2a", "all_gather"))
    check_tokens: int = flag(128, "of a rank, in the comparison with float64")
    causal: bool = flag(True, "the mask of a document")
    dtype: str = flag("bfloat16", "of the tensors", choices=("bfloat16", "float32"))
    device: str = flag("auto", "where", choices=("auto", "cpu"))


def our_method(shapes: Shapes, offsets: Offsets, schedule: str, kernel: str, transport: str) -> Method:
    """Return one way to run ours."""
    layout = schedule if schedule in ("zigzag", "load_balanced") else "contiguous"
    config = DistAttentionConfig(
        schedule=schedule if layout == "contiguous" else "auto", kernel=kernel, transport=transport
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dist_flash_attn_varlen_func(q, k, v, offsets, causal=shapes.causal, layout=layout, config=config)  # type: ignore[return-value]

    return Method(
        f"dfa {schedule} {kernel} {transport}", "ours", lambda *_: attend,
        lambda x, _: shard_sequence(x[0], layout=layout, dim=0, cu_seqlens=offsets),
        took=lambda: in_use()[-1].plan.schedule,
    )  # fmt: skip


def ring_methods(shapes: Shapes, offsets: Offsets, world: World) -> list[Method]:
    """Return ring-flash-attn's three varlen functions."""
    version_of("ring-flash-attn"), version_of("flash-attn")

    def cut(function: str) -> Attention:
        local = [offset // world.size for offset in offsets]
        cu_seqlens = torch.tensor(local, dtype=torch.int32, device=world.device)
        longest = max(hi - lo for lo, hi in pairwise(local))
        attend = getattr(ring_flash_attn._package(), function)
        return lambda q, k, v: attend(q, k, v, cu_seqlens, longest, causal=shapes.causal)

    def chunk_of_each(x: torch.Tensor, _: World) -> torch.Tensor:
        return torch.cat([x[0, lo:hi].chunk(world.size)[world.rank] for lo, hi in pairwise(offsets)])

    name, kind = "ring-flash-attn {} varlen", "baseline"
    found = [
        Method(
            name.format("llama3"), kind,
            lambda *_: ring_flash_attn.llama3_varlen(offsets, shapes.kv_heads, shapes.causal, world),
            lambda x, _: x[0].chunk(world.size)[world.rank],
        ),
        Method(name.format("ring"), kind, lambda *_: cut("ring_flash_attn_varlen_func"), chunk_of_each),
        Method(name.format("zigzag"), kind, lambda *_: cut("zigzag_ring_flash_attn_varlen_func"), zigzag_of(offsets)),
    ]  # fmt: skip
    return found if shapes.causal else found[:2]


def engine_methods(shapes: Shapes, offsets: Offsets, world: World) -> list[Method]:
    """Return Transformer Engine's attention by its cp_comm_type."""
    version_of("transformer-engine")
    if not world.cuda:
        raise UnsupportedError("TransformerEngine on a CPU", "its kernels are CUDA", "GPUs")

    def attention(kind: str) -> Attention:
        mask = "padding_causal" if shapes.causal else "padding"
        attention = context_parallel(shapes, kind, world, "thd", mask)
        ends = torch.tensor(offsets, dtype=torch.int32, device=world.device)
        longest = max(hi - lo for lo, hi in pairwise(offsets))
        documents: dict[str, Any] = {f"cu_seqlens_{side}{of}": ends for side in ("q", "kv") for of in ("", "_padded")}
        documents |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        return lambda q, k, v: attention(q, k, v, **documents).view(q.shape)

    return [
        Method(f"te {kind}", "baseline", lambda *_, kind=kind: attention(kind), zigzag_of(offsets))  # type: ignore[misc]
        for kind in shapes.peers
    ]


def zigzag_of(offsets: Offsets) -> Split:
    """Return the cut of every document into 2P chunks, as Megatron's scripts cut them."""
    return lambda x, world: shard_sequence(x[0], layout=layouts.zigzag_documents(offsets, world.size), dim=0)


def methods_of(shapes: Shapes, offsets: Offsets, world: World) -> list[Method]:
    """Return what is compared over one pack: ours, and the packages that are installed."""
    found = [
        our_method(shapes, offsets, *one) for one in itertools.product(shapes.schedule, shapes.kernel, shapes.transport)
    ]
    for of_package in (ring_methods, engine_methods):
        with contextlib.suppress(UnsupportedError):
            found += of_package(shapes, offsets, world)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Check, time, print and write."""
    shapes = flags_of(Shapes, __doc__, argv)
    world = join(shapes.device)
    short = replace(shapes, tokens_per_rank=shapes.check_tokens, mean=3.0, sigma=1.0, lengths=None)
    few, offsets = (one.documents(world.size, one.seed) for one in (short, shapes))
    problem = Problem(
        shapes.heads, shapes.kv_heads, shapes.head_dim, "causal" if shapes.causal else "full", shapes.dtype
    )
    sizes, where = (shapes.heads, shapes.kv_heads, shapes.head_dim, 1), {"dtype": getattr(torch, shapes.dtype)}
    small, whole = (draw(ends[-1], *sizes, device=world.device, **where) for ends in (few, offsets))
    exact = truth_of(problem, small, band_of(shapes.causal), few)
    about = {"documents": len(offsets) - 1, "cu_seqlens": offsets}
    report, timed = Report(shapes.out, shapes, about=about), list[tuple[dict[str, Any], list[Timer]]]()
    pairs = zip(methods_of(shapes, few, world), methods_of(shapes, offsets, world), strict=True)
    for small_method, method in pairs:
        error, state, why = compared(small_method, exact, world)
        said = why if state in ("", "wrong") else f"{state}: {why}"
        row: dict[str, Any] = {"method": method.name, "error": error, "wrong": said}
        report.add(row)
        if not state:
            *leaves, dout = (method.split(x, world) for x in whole)
            forward, both = passes(method.start(problem, len(dout), world, contextlib.ExitStack()), leaves, dout)
            for _ in range(3):
                both()
            row["took"] = method.took()
            forward()
            calls = (forward, both, functools.partial(in_a_row, both))
            timed.append((row, [Timer(call, max(1, shapes.repetitions // ROUNDS)) for call in calls]))
    del small, whole, exact
    for _ in range(ROUNDS):
        take_turns(world, [timer for _, timers in timed for timer in timers])
        for row, timers in timed:
            row |= rates(timers, problem, offsets, world)
        report.write()
    for row, _ in timed:
        report.show(row)
    world.leave()


def rates(timers: Sequence[Timer], problem: Problem, offsets: Offsets, world: World) -> dict[str, float]:
    """Return milliseconds, and TFLOP/s per rank."""
    forward, both, in_row = (timer.median for timer in timers)
    work = sum((n * n + n) / 2 if problem.causal else n * n for n in (hi - lo for lo, hi in pairwise(offsets)))
    flops = 4 * work * problem.heads * problem.head_dim / world.size / 1e9
    return {
        "forward_ms": forward,
        "both_ms": both,
        "host_ms": timers[1].host_median,
        "in a row ms": in_row / ROW,
        "forward TFLOP/s": flops / forward,
        "both TFLOP/s": FLOPS_OF["both"] * flops / both,
        "in a row TFLOP/s": ROW * FLOPS_OF["both"] * flops / in_row,
    }


def in_a_row(both: Call) -> None:
    """Call it as often as `ROW` says."""
    for _ in range(ROW):
        both()


if __name__ == "__main__":
    main()
