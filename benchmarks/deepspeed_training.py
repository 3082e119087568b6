"""Trains model shapes with ZeRO-3 over sequences shared by all GPUs: our attention beside DeepSpeed's Ulysses.

    torchrun --nproc-per-node 4 -m benchmarks.deepspeed_training --out results.json
    torchrun --nproc-per-node 4 -m benchmarks.deepspeed_training --shapes qwen3-4b --layers 36 --vocabulary 151936 \
        --lengths 65536 --offload-optimizer --tiled --methods dfa-remat ulysses-full       # a whole Qwen3-4B
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m benchmarks.deepspeed_training --dry-run      # tiny

By default layers and vocabulary are cut, which the output says. All methods share one engine per shape, so that only
attention and checkpointing differ, and have come to the loss and gradients of one rank before any is timed. A case that
runs out of memory, that Ulysses refuses, or for which no time is left is recorded so.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.deepspeed_common import (
    any_rank,
    batch_of,
    build,
    join,
    made_with,
    mean,
    peak_gib,
    take_step,
)
from benchmarks.deepspeed_longest import is_memory
from benchmarks.deepspeed_methods import Method, attention, compare
from benchmarks.deepspeed_shapes import SHAPES
from dfa_megatron.errors import DistAttentionError

METHODS = {
    "dfa-remat": Method("dfa", "remat"),
    "ulysses-full": Method("ulysses", "full"),
    "dfa-full": Method("dfa", "full"),
    "dfa-none": Method("dfa", "none"),
    "ulysses-none": Method("ulysses", "none"),
}
"""In the order in which time is spent on them."""
MODELS = {"qwen3-4b": (36, 151936), "llama-3-8b": (32, 128256), "qwen2.5-7b": (28, 152064)}
"""Layers and vocabulary of the models that shapes are of."""


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-3-8b", "qwen2.5-7b", "33-heads"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 65536, 131072], help="of whole sequences")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=2, help="timed ones, after one that is not")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--sdpa", choices=["cudnn", "flash"], default="cudnn", help="the kernel that Ulysses takes")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--tiled", nargs="?", choices=["none", "loss", "all"], const="all", default="none",
        help="of every method: logits and loss tile by tile, or the MLPs too (all, also without a value)",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=210.0, help="seconds; later cases are left out")
    parser.add_argument("--offload-optimizer", action="store_true", help="to the CPU")
    parser.add_argument("--out", type=Path, help="a JSON file, written again after every case")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU too")
    args = parser.parse_args()
    if args.dry_run:
        args.lengths, args.layers, args.vocabulary, args.steps = [64, 128], 2, 128, 1
    return args


def start(shape: str, args: argparse.Namespace, about: dict[str, Any]) -> Any:
    """Build an engine whose methods agree with one rank; write differences and optimizer to `about`.

    Raises:
        RuntimeError: a method computes something else.
    """
    sizes = SHAPES[shape].toy() if args.dry_run else SHAPES[shape]
    engine, about["optimizer"] = build(
        sizes, layers=args.layers, vocabulary=args.vocabulary, longest=max(args.lengths), tiled=args.tiled,
        offload=args.offload_optimizer, dry=args.dry_run,
    )  # fmt: skip
    methods = {name: METHODS[name] for name in args.methods}
    length = (16 if args.dry_run else 1024) * dist.get_world_size()
    about["agreement"][shape] = compare(engine, methods, length, args.vocabulary, **choices(args))
    return engine


def choices(args: argparse.Namespace) -> dict[str, str]:
    """Return the kernels and the schedule."""
    return {"kernel": args.kernel, "schedule": args.schedule, "sdpa": args.sdpa}


def stop(engine: Any) -> None:
    """Give its memory back."""
    if engine is not None:
        engine.destroy()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(engine: Any, method: Method, length: int, vocabulary: int, steps: int) -> dict[str, Any]:
    """Return tokens per second, of all GPUs and of each, and peak memory, of whole training steps."""
    batch = batch_of(engine, length, vocabulary)
    times = []
    for step in range(steps + 1):
        if step == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds, loss = take_step(engine, batch)
        times.append(seconds)
    rate = length / min(times[1:])
    return {
        "seconds_per_step": times[1:],
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / dist.get_world_size(),
        "peak_gib": peak_gib(engine, method.attention),
        "loss": mean(loss),
    }


def attempt(engine: Any, case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the case with its figures, or with the reason why there are none; the same on all ranks.

    Raises:
        RuntimeError: other ranks hang in the case, because one of them ran out of memory.
    """
    try:
        method = METHODS[case["method"]]
        with attention(engine, method, **choices(args)):
            case |= measure(engine, method, case["length"], args.vocabulary, args.steps)
    except (torch.OutOfMemoryError, DistAttentionError) as error:
        if not is_memory(error):
            raise
        case["failed"] = f"out of memory: {str(error).splitlines()[0]}"
    # Ranks that are stuck in a collective of the case do not come; this names them instead of waiting for minutes.
    dist.monitored_barrier(_gloo_group(), timeout=timedelta(seconds=60))
    if any_rank("failed" in case):
        case.setdefault("failed", "on another rank")
    return case


@functools.cache
def _gloo_group() -> Any:
    return dist.new_group(backend="gloo")


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every case once: for each shape, the lengths from the shortest."""
    for shape in args.shapes:
        for length in sorted(args.lengths):
            for method in METHODS:
                if method in args.methods:
                    yield {"shape": shape, "length": length, "method": method}


def run(args: argparse.Namespace, about: dict[str, Any]) -> None:
    """Run the cases while there is time; an engine in which one failed is not used again."""
    begin = time.perf_counter()
    engine, current = None, ""
    failed: set[tuple[str, str]] = set()
    for case in cases(args):
        key = (case["shape"], case["method"])
        if key in failed:
            case["failed"] = "a shorter sequence did not run"
        elif any_rank(time.perf_counter() - begin > args.budget):
            case["failed"] = "no time left"
        else:
            if engine is None or case["shape"] != current:
                stop(engine)
                engine, current = None, case["shape"]
                engine = start(current, args, about)
            if refused := about["agreement"][current][case["method"]].get("refused"):  # heads, by Ulysses
                case["failed"] = refused
                failed.add(key)
            elif "failed" in attempt(engine, case, args):
                failed.add(key)
                stop(engine)
                engine = None
        about["results"].append(case)
        if dist.get_rank() == 0:
            print(json.dumps(case), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(about, indent=2) + "\n")


def main() -> None:
    """Run, and write the findings with the machine and the arguments."""
    args = parse()
    join(300.0)
    _gloo_group()
    cut = [name for name in args.shapes if MODELS.get(name) != (args.layers, args.vocabulary)]
    report: dict[str, Any] = {
        **made_with(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "note": f"{args.layers} layers and a vocabulary of {args.vocabulary}"
        + (f": cut from the models of {', '.join(cut)}" if cut else ", none cut"),
        "agreement": {},
        "results": [],
    }
    run(args, report)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
