"""Times attention over packed documents beside ring-flash-attn's varlen functions, after checking each against float64.

    torchrun --nproc-per-node 4 -m benchmarks.packed --heads 64 --kv-heads 8 --tokens-per-rank 8192 --out packed.json

Documents are drawn log-normal, or as --lengths says, to a quarter of the pack, and rounded to multiples of 2P tokens:
ring-flash-attn's ring and zigzag cut each document into P or 2P chunks. A method that is wrong on a small pack is
not timed (ring-flash-attn's ring and zigzag are in float32: they sum into what they read). Times are of the slowest
rank, the median over repetitions in which methods take turns, each from an idle GPU; `in a row` is of one of 8 calls
without a wait between them, as a model's layers make them. TFLOP/s per rank count the pairs of the documents:
4 * pairs * heads * head_dim forward, 2.5 times that backward. `new pack` is what the first call with documents that
were not seen before takes longer on the host: planning, and agreeing on it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import NAMES, too_far
from benchmarks.attention.failures import Failure, together
from benchmarks.documents import Offsets, draw_documents, lengths_of, log_normal
from dfa_megatron import DistAttentionConfig, dist_flash_attn_varlen_func, shard_sequence
from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.doctor.world import World, join
from dfa_megatron.runtime.prepare import in_use

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-4}
BOTH = 3.5
"""Forward and backward, in forwards."""
ROW = 8
"""Calls in a row."""


@dataclass(frozen=True)
class Method:
    """start: the documents -> the attention of this rank's tokens. split: (tokens, documents) -> this rank's tokens."""

    name: str
    start: Callable[[Offsets], Attend]
    split: Callable[[torch.Tensor, Offsets], torch.Tensor]


def our_method(schedule: str, kernel: str, transport: str, causal: bool) -> Method:
    """Return one way to run ours."""
    layout = schedule if schedule in ("zigzag", "load_balanced") else "contiguous"
    config = DistAttentionConfig(
        schedule=schedule if layout == "contiguous" else "auto", kernel=kernel, transport=transport
    )

    def start(offsets: Offsets) -> Attend:
        return lambda q, k, v: dist_flash_attn_varlen_func(
            q, k, v, offsets, causal=causal, layout=layout, config=config
        )  # type: ignore[return-value]

    def split(x: torch.Tensor, offsets: Offsets) -> torch.Tensor:
        return shard_sequence(x, layout=layout, dim=0, cu_seqlens=offsets)

    return Method(f"dfa {schedule} {kernel} {transport}", start, split)


def peer_methods(world: World, kv_heads: int, causal: bool) -> list[Method]:
    """Return ring-flash-attn's three varlen functions, or nothing where it or flash-attn is not installed."""
    try:
        version("ring-flash-attn"), version("flash-attn")
    except PackageNotFoundError:
        return []
    from benchmarks.attention.baselines import ring_flash_attn

    package, stride = ring_flash_attn._package(), max(n for n in (1, 2, 3, 4) if kv_heads % n == 0)

    def llama3(offsets: Offsets) -> Attend:
        whole = torch.tensor(offsets, dtype=torch.int32, device=world.device)
        *prepared, local_k_slice = package.llama3_flash_attn_prepare_cu_seqlens(whole, causal, world.rank, world.size)
        options = {"heads_k_stride": stride, "local_k_slice": local_k_slice, "causal": causal}
        return lambda q, k, v: package.llama3_flash_attn_varlen_func(
            q, k, v, *prepared, **options, group=dist.group.WORLD
        )

    def cut(function: str) -> Callable[[Offsets], Attend]:
        def start(offsets: Offsets) -> Attend:
            local = [offset // world.size for offset in offsets]
            cu_seqlens = torch.tensor(local, dtype=torch.int32, device=world.device)
            longest = max(hi - lo for lo, hi in pairwise(local))
            attend = getattr(package, function)
            return lambda q, k, v: attend(q, k, v, cu_seqlens, longest, causal=causal)

        return start

    def in_order(x: torch.Tensor, offsets: Offsets) -> torch.Tensor:
        return x.chunk(world.size)[world.rank]

    def of_each(chunks: tuple[int, ...], count: int) -> Callable[[torch.Tensor, Offsets], torch.Tensor]:
        def split(x: torch.Tensor, offsets: Offsets) -> torch.Tensor:
            parts = (x[lo:hi].chunk(count) for lo, hi in pairwise(offsets))
            return torch.cat([part[chunk] for part in parts for chunk in chunks])

        return split

    zigzag = of_each((world.rank, 2 * world.size - 1 - world.rank), 2 * world.size)
    methods = [
        Method("ring-flash-attn llama3 varlen", llama3, in_order),
        Method("ring-flash-attn ring varlen", cut("ring_flash_attn_varlen_func"), of_each((world.rank,), world.size)),
    ]
    if causal:
        methods.append(Method("ring-flash-attn zigzag varlen", cut("zigzag_ring_flash_attn_varlen_func"), zigzag))
    return methods


def draw_inputs(args: argparse.Namespace, tokens: int, world: World, seed: int) -> list[torch.Tensor]:
    """Return q, k, v and dout of all tokens, the same on every rank of one kind of device."""
    generator = torch.Generator(world.device).manual_seed(seed)
    counts = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    shapes = [(tokens, heads, args.head_dim) for heads in counts]
    draws = (torch.randn(shape, generator=generator, device=world.device) for shape in shapes)
    return [x.to(getattr(torch, args.dtype)) for x in draws]


def check(method: Method, args: argparse.Namespace, world: World) -> None:
    """Raise an error if a method is wrong on a small pack."""
    tokens = 128 * world.size
    offsets = draw_documents(tokens, 2 * world.size, 1, log_normal(3.0, 1.0))
    q, k, v, dout = draw_inputs(args, tokens, world, 1)
    local = [method.split(x, offsets).clone().requires_grad_() for x in (q, k, v)]
    out = method.start(offsets)(*local)
    got = torch.autograd.grad(out, local, method.split(dout, offsets))
    wanted = (method.split(w, offsets) for w in exact_of((q, k, v, dout), offsets, args.causal))
    errors = {name: relative(g, w) for name, g, w in zip(NAMES, (out, *got), wanted, strict=True)}
    if why := too_far(errors, TOLERANCE[getattr(torch, args.dtype)]):
        raise ValueError(why)


def passes(method: Method, offsets: Offsets, inputs: list[torch.Tensor]) -> tuple[Callable[[], object], ...]:
    """Return the forward, and the forward and backward, of this rank."""
    q, k, v, dout = (method.split(x, offsets).clone() for x in inputs)
    leaves, attend = [x.requires_grad_() for x in (q, k, v)], method.start(offsets)

    def forward() -> object:
        with torch.no_grad():
            return attend(*leaves)

    return forward, lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def in_a_row(both: Callable[[], object]) -> None:
    """Call it as often as `ROW` says."""
    for _ in range(ROW):
        both()


def new_packs(method: Method, args: argparse.Namespace, world: World, tokens: int, usual: float) -> float:
    """Return the host's milliseconds for new documents: the median of some packs, less `usual`."""
    taken = []
    for seed in range(100, 105):
        offsets = draw_documents(tokens, 2 * world.size, seed, lengths_of(args.mean, args.sigma, args.lengths))
        both = passes(method, offsets, draw_inputs(args, tokens, world, 2))[1]
        if world.cuda:
            torch.cuda.synchronize()
        dist.barrier(world.side)
        start = time.perf_counter()
        both()
        taken.append(1e3 * (time.perf_counter() - start))
        if world.cuda:
            torch.cuda.synchronize()
    return world.slowest([statistics.median(taken)])[0] - usual


def main() -> None:
    """Check, time, print and write."""
    args = arguments()
    world = join("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    tokens = args.tokens_per_rank * world.size
    offsets = draw_documents(tokens, 2 * world.size, args.seed, lengths_of(args.mean, args.sigma, args.lengths))
    pairs = sum((n * n + n) / 2 if args.causal else n * n for n in (hi - lo for lo, hi in pairwise(offsets)))
    flops = 4 * pairs * args.heads * args.head_dim / world.size
    combinations = itertools.product(args.schedule, args.kernel, args.transport)
    methods = [our_method(*one, args.causal) for one in combinations] + peer_methods(world, args.kv_heads, args.causal)
    inputs, rows, timers = draw_inputs(args, tokens, world, 0), list[dict[str, Any]](), list[tuple[Timer, ...]]()
    for method in methods:
        wrong = together(world, functools.partial(check, method, args, world))
        row: dict[str, Any] = {"method": method.name, "wrong": wrong.why if isinstance(wrong, Failure) else ""}
        rows.append(row)
        if row["wrong"]:
            continue
        forward, both = passes(method, offsets, inputs)
        for _ in range(3):
            both()
        if method.name.startswith("dfa"):
            row["took"] = in_use()[-1].plan.schedule
        forward()
        calls = forward, both, functools.partial(in_a_row, both)
        timers.append(tuple(Timer(call, args.repetitions) for call in calls))
    take_turns(world, [timer for each in timers for timer in each])
    right = [row for row in rows if not row["wrong"]]
    for row, (forward_timer, both_timer, row_timer) in zip(right, timers, strict=True):
        row |= {"forward ms": forward_timer.median, "both ms": both_timer.median, "host ms": both_timer.host_median}
        row |= {
            "forward TFLOP/s": flops / forward_timer.median / 1e9,
            "both TFLOP/s": BOTH * flops / both_timer.median / 1e9,
            "in a row TFLOP/s": ROW * BOTH * flops / row_timer.median / 1e9,
        }
        if row["method"].startswith("dfa") and args.new_packs:
            method = next(method for method in methods if method.name == row["method"])
            row["new pack ms"] = new_packs(method, args, world, tokens, both_timer.host_median)
    if world.rank == 0:
        show(rows, offsets, world)
        if args.out:
            about = vars(args) | {"ranks": world.size, "torch": torch.__version__, "cu_seqlens": offsets}
            args.out.write_text(json.dumps({"about": {k: str(v) for k, v in about.items()}, "rows": rows}, indent=1))
    world.leave()


def show(rows: list[dict[str, Any]], offsets: Offsets, world: World) -> None:
    """Print the table."""
    longest = max(hi - lo for lo, hi in pairwise(offsets))
    print(f"{len(offsets) - 1} documents, the longest of {longest} tokens, {offsets[-1]} tokens on {world.size} ranks")
    for row in rows:
        numbers = "  ".join(f"{key} {value:8.2f}" for key, value in row.items() if isinstance(value, float))
        print(f"{row['method']:36} {'WRONG: ' + row['wrong'] if row['wrong'] else numbers}  {row.get('took', '')}")


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return the flags that every benchmark of packs has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens-per-rank", type=int, default=8192)
    parser.add_argument("--mean", type=float, default=7.0, help="of the logarithm of a document's tokens")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the same")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    return parser


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=Path, help="a histogram of lengths in place of mean and sigma")
    parser.add_argument("--schedule", nargs="+", default=["auto", "load_balanced"])
    parser.add_argument("--kernel", nargs="+", default=["auto"])
    parser.add_argument("--transport", nargs="+", default=["auto"])
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--new-packs", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| over |want|, in float64."""
    return float((got.double() - want).norm() / want.norm())


def exact_of(inputs: Sequence[torch.Tensor], offsets: Offsets, causal: bool) -> tuple[torch.Tensor, ...]:
    """Return out, dq, dk and dv of q, k, v and dout in float64, document by document; 0 behind the last."""
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    documents = ([x[None, lo:hi] for x in leaves] for lo, hi in pairwise(offsets))
    outs = [dense_attention(*qkv, band_of(causal))[0][0] for qkv in documents]
    out = torch.cat([*outs, leaves[0][offsets[-1] :] * 0])
    return out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())


if __name__ == "__main__":
    main()
