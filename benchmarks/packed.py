"""Times attention over packed documents beside others' varlen functions, or over masks, each checked with float64.

    torchrun --nproc-per-node 4 -m benchmarks.packed --heads 64 --kv-heads 8 --tokens-per-rank 8192 --out packed.json
    torchrun --nproc-per-node 2 -m benchmarks.packed --masks all --heads 32 --tokens 32768 131072 --out masks.json

Documents are drawn log-normal, or as --lengths says, to a quarter of the pack, and rounded to multiples of 2P tokens:
ring-flash-attn and Transformer Engine cut each into P or 2P chunks. A method that is wrong on a small pack, or with one
kv head over 8,192 tokens of a mask, is not timed (ring-flash-attn's ring and zigzag are in float32: they sum into what
they read). Times are of the slowest rank, the median over repetitions in which methods take turns, each from an idle
GPU; `in a row`, and every time of a mask, is of one of 8 calls without a wait between them, as a model's layers make
them. TFLOP/s per rank count the pairs that attend: 4 * pairs * heads * head_dim forward, 2.5 times that backward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.attention.baselines import magi, ring_flash_attn, version_of
from benchmarks.attention.baselines.transformer_engine import context_parallel
from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import Truth, compared, truth_of
from benchmarks.attention.job import FLOPS_OF, Problem
from benchmarks.attention.method import Attention, Method, Split, contiguous
from benchmarks.bench import Call, Report, benchmark, dtype_on, flags_of
from benchmarks.documents import Offsets, PackShapes
from benchmarks.masks import CASES, flex
from benchmarks.programs import Tensors, draw, passes
from dfa_megatron import (
    DistAttentionConfig,
    dist_flash_attn_func,
    dist_flash_attn_varlen_func,
    layouts,
    masks,
    shard_sequence,
)
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import flag
from dfa_megatron.masks import Mask
from dfa_megatron.runtime.prepare import in_use

ROW = 8
"""Calls in a row."""
ALL = "all"
ORDERS = ("zigzag", "load_balanced")
"""Layouts of a pack's tokens."""


@dataclass(frozen=True)
class Shapes(PackShapes):
    """What is timed, and how."""

    schedule: tuple[str, ...] = flag(("auto", "load_balanced"), "of ours, or a layout of a pack's tokens")
    kernel: tuple[str, ...] = flag(("auto",), "of ours")
    transport: tuple[str, ...] = flag(("auto",), "of ours")
    peers: tuple[str, ...] = flag(("p2p", "a2a"), "of Transformer Engine", choices=("p2p", "a2a", "all_gather"))
    check_tokens: int = flag(128, "of a rank of a pack, in the comparison with float64")
    causal: bool = flag(True, "the mask of a document")
    dtype: str = flag("", "default: bfloat16, float32 on a CPU", choices=("bfloat16", "float32"))
    masks: tuple[str, ...] = flag((), f"in place of a pack; or {ALL}", choices=(*CASES, ALL))
    tokens: tuple[int, ...] = flag((32768,), "of all ranks, of a mask", metavar="N")
    flex: bool = flag(False, "FlexAttention beside the trees, on one GPU")

    def problem(self, world: World, heads: int, kv_heads: int, *, causal: bool) -> Problem:
        """Return the attention that is checked or timed."""
        dtype = self.dtype or str(dtype_on(world.device)).removeprefix("torch.")
        return Problem(heads, kv_heads, self.head_dim, "causal" if causal else "full", dtype)


@dataclass(frozen=True)
class Case:
    """A pack or a mask: what its rows begin with, its methods over few tokens and over all, and the truth of the few.

    about: empty of a pack, which is timed more closely.
    """

    about: dict[str, Any]
    problem: Problem
    methods: list[tuple[Method, Method]]
    exact: Truth
    mask: Mask


def drawn(problem: Problem, tokens: int, world: World) -> Tensors:
    """Return q, k, v and dout of all tokens, the same on every rank."""
    sizes, dtype = (problem.heads, problem.kv_heads, problem.head_dim), getattr(torch, problem.dtype)
    return draw(tokens, *sizes, 1, device=world.device, dtype=dtype)


def our_methods(shapes: Shapes, function: Callable[..., Any], offsets: Offsets | None = None) -> list[Method]:
    """Return the ways to run a function of ours over a pack, or one with a mask, which takes tokens in order."""

    def method(schedule: str, kernel: str, transport: str) -> Method:
        layout = schedule if schedule in ORDERS else "contiguous"
        choice = schedule if layout == "contiguous" else "auto"
        config = DistAttentionConfig(schedule=choice, kernel=kernel, transport=transport)

        def split(x: torch.Tensor, world: World) -> torch.Tensor:
            if offsets is None:
                return contiguous(x, world)
            return shard_sequence(x[0], layout=layout, dim=0, cu_seqlens=offsets)

        return Method(
            f"dfa {schedule} {kernel} {transport}", "ours",
            lambda *_: functools.partial(function, layout=layout, config=config), split,
            took=lambda: f"{in_use()[-1].plan.schedule}, {in_use()[-1].kernel.name}",
        )  # fmt: skip

    orders = [one for one in shapes.schedule if offsets is not None or one not in ORDERS]
    return [method(*one) for one in itertools.product(orders, shapes.kernel, shapes.transport)]


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


def pack_methods(shapes: Shapes, offsets: Offsets, world: World) -> list[Method]:
    """Return what is compared over one pack: ours, and the packages that are installed."""
    ours = functools.partial(dist_flash_attn_varlen_func, cu_seqlens=offsets, causal=shapes.causal)
    found = our_methods(shapes, ours, offsets)
    for of_package in (ring_methods, engine_methods, magi.pack_methods):
        with contextlib.suppress(UnsupportedError):
            found += of_package(shapes, offsets, world)
    return found


def pack_case(shapes: Shapes, world: World, report: Report) -> Case:
    """Return the pack that is drawn."""
    short = replace(shapes, tokens_per_rank=shapes.check_tokens, mean=3.0, sigma=1.0, lengths=None)
    few, offsets = (one.documents(world.size, one.seed) for one in (short, shapes))
    report.content["about"] = {"documents": len(offsets) - 1, "cu_seqlens": offsets}
    small, mask = (masks.documents([hi - lo for lo, hi in pairwise(x)], causal=shapes.causal) for x in (few, offsets))
    problem = shapes.problem(world, shapes.heads, shapes.kv_heads, causal=shapes.causal)
    pairs = zip(pack_methods(shapes, few, world), pack_methods(shapes, offsets, world), strict=True)
    return Case({}, problem, [*pairs], truth_of(problem, drawn(problem, few[-1], world), small), mask)


def mask_case(shapes: Shapes, name: str, tokens: int, world: World) -> Case:
    """Return a mask, which is checked over fewer tokens: long documents have other tiles than short ones."""
    mask, small = CASES[name](tokens), CASES[name](min(tokens, 8192 - 8192 % world.size))
    thin = shapes.problem(world, shapes.heads // shapes.kv_heads, 1, causal=False)
    pairs = []
    for over in (small, mask):
        pairs.append(our_methods(shapes, functools.partial(dist_flash_attn_func, mask=over)))
        if shapes.flex and name.startswith("tree") and world.size == 1:
            start = functools.partial(flex, name, over.length)
            pairs[-1].append(Method("flex", "baseline", lambda *_, start=start: start(world.device)))  # type: ignore[misc]
    about = {"mask": name, "tokens": tokens, "tiles": len(mask.tiles)}
    exact = truth_of(thin, drawn(thin, small.length, world), small)
    return Case(
        about,
        shapes.problem(world, shapes.heads, shapes.kv_heads, causal=False),
        [*zip(*pairs, strict=True)],
        exact,
        mask,
    )


def cases(shapes: Shapes, world: World, report: Report) -> Iterator[Case]:
    """Yield the pack, or the masks."""
    if not shapes.masks:
        yield pack_case(shapes, world, report)
    for tokens in shapes.tokens:
        for name in CASES if ALL in shapes.masks else shapes.masks:
            yield mask_case(shapes, name, tokens, world)


def main(argv: Sequence[str] | None = None) -> None:
    """Check, time, print and write."""
    shapes = flags_of(Shapes, __doc__, argv)
    with benchmark(shapes) as (world, report):
        for case in cases(shapes, world, report):
            race(case, shapes.repetitions, world, report)


def race(case: Case, repetitions: int, world: World, report: Report) -> None:
    """Compare every method with float64, then let those that are right take turns."""
    whole, timed = drawn(case.problem, case.mask.length, world), list[tuple[dict[str, Any], dict[str, Timer]]]()
    for small_method, method in case.methods:
        error, state, why = compared(small_method, case.exact, world)
        said = why if state in ("", "wrong") else f"{state}: {why}"
        row = {**case.about, "method": method.name, "error": error, "wrong": said}
        report.add(row)
        if state:
            continue
        *leaves, dout = (method.split(x, world).contiguous() for x in whole)
        forward, both = passes(method.start(case.problem, dout.shape[-3], world, contextlib.ExitStack()), leaves, dout)
        calls: dict[str, Call] = {} if case.about else {"forward": forward, "both": both}
        calls["" if case.about else "in a row"] = functools.partial(in_a_row, both)
        for call in (both, *calls.values()):
            call()
        row["took"] = method.took()
        timed.append((row, {name: Timer(call, repetitions) for name, call in calls.items()}))
    del whole
    take_turns(world, [timer for _, timers in timed for timer in timers.values()])
    flops = 4 * case.mask.area * case.problem.heads * case.problem.head_dim / world.size / 1e9
    for row, timers in timed:
        for name, timer in timers.items():
            times, passes_of = (1, FLOPS_OF[name]) if name in FLOPS_OF else (ROW, FLOPS_OF["both"])
            found = {"ms": timer.median / times, "host ms": timer.host_median / times}
            found["TFLOP/s"] = flops * passes_of / found["ms"]
            row |= {f"{name} {what}".strip(): value for what, value in found.items()}
        report.show(row)
    report.write()


def in_a_row(both: Call) -> None:
    """Call it as often as `ROW` says."""
    for _ in range(ROW):
        both()


if __name__ == "__main__":
    main()
