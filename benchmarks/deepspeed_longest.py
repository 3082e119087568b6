"""Finds the longest sequence that one ZeRO-3 step takes: ours beside DeepSpeed's ALST.

    python -m benchmarks.deepspeed_longest --layers 2 --budget 540 --out longest.json      # on all GPUs there are
    python -m benchmarks.deepspeed_longest --shape qwen3-4b --layers 4 --gpus 1 --offload-optimizer --memory-gib 40 \\
        --shortest 65536 --resolution 16384 --methods dfa-tiles-host dfa-tiles-host-stages --out longest.json
    DS_ACCELERATOR=cpu python -m benchmarks.deepspeed_longest --dry-run                    # tiny, two ranks

Forward, backward and optimizer, with tiled loss for all. dfa-tiles has norms and MLPs by `mlp_tile`; the others have
ALST's tiled MLP. Lengths double until one runs out of memory or the time left is less than four times the last step;
between the longest that ran and the shortest that ran out of memory one more is tried. With --resolution the next
length is the one that the last peak says will fit, until two neighbors do and do not. Every attempt is a fresh set of
processes, which takes a short step before the one that is timed. First of all, loss and gradients of every method are
compared with one rank's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_shapes import SHAPES, VOCABULARIES
from benchmarks.longest_search import MEMORY, STOPPED, search

METHODS = {
    "dfa-remat": {"attention": "dfa", "checkpoint": "remat"},
    "dfa-tiles": {"attention": "dfa", "checkpoint": "remat", "tiled": True},
    "ulysses-full": {"attention": "ulysses", "checkpoint": "full"},
    "dfa-tiles-host": {"attention": "dfa", "checkpoint": "remat", "tiled": True, "on_host": True},
    "dfa-tiles-host-stages": {"attention": "dfa", "checkpoint": "remat", "tiled": True, "on_host": True, "stages": 8},
    "ulysses-full-host": {"attention": "ulysses", "checkpoint": "full", "on_host": True},
}
"""host: what a checkpoint keeps is in host memory: inputs of layers, attention's output and lse. tiled: `mlp_tile`."""
DEFAULT = ("dfa-tiles", "ulysses-full", "dfa-tiles-host", "ulysses-full-host")
ENOUGH = 20.0
"""Seconds of a step from which on it is taken once."""
SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In the text of errors of PyTorch, NCCL and cuBLAS."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(VOCABULARIES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shortest", type=int, help="the first length, of whole sequences (default: 262144)")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(DEFAULT))
    parser.add_argument("--resolution", type=int, help="tokens to which the longest is found")
    parser.add_argument("--memory-gib", type=float, help="of a smaller GPU: PyTorch takes no more")
    parser.add_argument("--offload-optimizer", action="store_true", help="to the CPU")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--sdpa", choices=["cudnn", "flash"], default="cudnn", help="the kernel that Ulysses takes")
    parser.add_argument("--gpus", type=int, help="ranks; by default all GPUs")
    parser.add_argument("--out", type=Path, help="a JSON file, written again after every attempt")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU too")
    parser.add_argument("--pretend-limit", type=int, help=argparse.SUPPRESS)  # a dry run has no more memory than this
    parser.add_argument("--rank-of", nargs=3, metavar=("METHOD", "LENGTH", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.shortest = args.shortest or (64 if args.dry_run else 262144)
    if args.dry_run:
        args.layers = 2
    return args


# The parent.


def launch(args: argparse.Namespace, ranks: int, method: str, length: int, seconds: float) -> dict[str, Any]:
    """Attempt once in new processes, or compare all methods if `method` is "compare"."""
    result: dict[str, Any] = {"method": method, "length": length}
    if seconds <= 0:
        return result | {"failed": STOPPED}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.deepspeed_longest", *sys.argv[1:], "--rank-of", method, str(length), folder]
        environment = dict(os.environ)
        if "PYTORCH_ALLOC_CONF" not in environment:
            environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as ALST asks for
        process = subprocess.Popen(command, stdout=sys.stderr, env=environment)  # noqa: S603 -- the command is ours
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(60)
        ends = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]
    result["seconds_in_all"] = time.perf_counter() - begin
    failures = [end["failed"] for end in ends if "failed" in end]
    # A rank that ran out of memory leaves others behind, whose errors are of its absence.
    failures.sort(key=lambda failure: not failure.startswith(MEMORY))
    if failures:
        return result | {"failed": failures[0]}
    if late:
        return result | {"failed": f"{STOPPED}: ended after {seconds:.0f} s"}
    if len(ends) != ranks:
        return result | {"failed": f"exit status {process.returncode}; see the output of the ranks"}
    result |= ends[0]
    return result


# The ranks: one attempt.


def rank_main(args: argparse.Namespace) -> None:
    """Run as a rank; write the result, or the error that ended it, to a file in the folder."""
    method, length, folder = args.rank_of[0], int(args.rank_of[1]), Path(args.rank_of[2])
    end = folder / f"rank{os.environ['RANK']}.json"
    try:
        result = agreement(args) if method == "compare" else step(args, method, length)
    except Exception as error:  # noqa: BLE001 -- whatever it is goes to the parent, and the other ranks are ended
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0]
        memory = any(sign in text for sign in SIGNS) or is_memory(error)
        end.write_text(json.dumps({"failed": f"{MEMORY}: {text}" if memory else f"{type(error).__name__}: {text}"}))
        sys.stderr.flush()
        os._exit(1)  # the other ranks may hang in a collective, and ending properly would wait for them
    end.write_text(json.dumps(result))
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries have aborted a busy machine's interpreter on its way out


def is_memory(error: BaseException | None) -> bool:
    """Return whether PyTorch's allocator caused it."""
    import torch

    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def engine_for(args: argparse.Namespace, longest: int) -> tuple[Any, str, int]:
    """Return an engine, its optimizer's name and the vocabulary."""
    import torch

    from benchmarks.deepspeed_common import build, join

    join(max(args.budget, 60.0))  # a collective waits for the computation before it
    if args.memory_gib and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gib / whole))
    shape, vocabulary = SHAPES[args.shape], VOCABULARIES[args.shape]
    if args.dry_run:
        shape, vocabulary = shape.toy(), 128
    engine, name = build(
        shape, layers=args.layers, vocabulary=vocabulary, longest=longest, tiled="all",
        offload=args.offload_optimizer, dry=args.dry_run,
    )  # fmt: skip
    return engine, name, vocabulary


def settings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the fields of a method; tiny models have two kv heads."""
    fields: dict[str, Any] = dict(METHODS[name])
    return fields | {"stages": min(fields.get("stages", 1), 2 if args.dry_run else 8)}


def agreement(args: argparse.Namespace) -> dict[str, Any]:
    """Return how far the methods are from one rank.

    Raises:
        RuntimeError: too far.
    """
    from benchmarks.deepspeed_common import made_with
    from benchmarks.deepspeed_methods import Method, compare

    length = (16 if args.dry_run else 1024) * int(os.environ["WORLD_SIZE"])
    engine, name, vocabulary = engine_for(args, length)
    methods = {name: Method(**settings(args, name)) for name in args.methods}
    report = compare(engine, methods, length, vocabulary, kernel=args.kernel, sdpa=args.sdpa)
    return {"agreement": report, "optimizer": name, **made_with()}


def step(args: argparse.Namespace, method: str, length: int) -> dict[str, Any]:
    """Time a step, after a short one with as many tiles, which makes what is made once.

    ZeRO-3 learns from that one in which order it gathers parameters, tile by tile.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.deepspeed_common import TILE, batch_of, held, mean, most, peak_gib, take_step
    from benchmarks.deepspeed_methods import Method, attention

    engine, _, vocabulary = engine_for(args, length)
    ranks = dist.get_world_size()
    if args.pretend_limit is not None and length > args.pretend_limit and dist.get_rank() == ranks - 1:
        raise torch.OutOfMemoryError("in a dry run")
    engine.module.tiles = tiles = math.ceil(length / ranks / (16 if args.dry_run else TILE))
    warmup = min(length, tiles * ranks * (8 if args.dry_run else math.ceil(4096 / tiles)))
    resting = (held() - engine.module.held_before) / 2**30
    with attention(engine, Method(**settings(args, method)), kernel=args.kernel, sdpa=args.sdpa):
        take_step(engine, batch_of(engine, warmup, vocabulary))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        batch = batch_of(engine, length, vocabulary)
        seconds, loss = take_step(engine, batch)
        seconds = most(seconds)
        if seconds < ENOUGH:  # kernels may have been made for this length
            again, loss = take_step(engine, batch)
            seconds = min(seconds, most(again))
    value, host = mean(loss), torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    host = host.to(loss.device)
    dist.all_reduce(host)
    return {
        "seconds_per_step": seconds,
        "tokens_per_second_per_gpu": length / seconds / ranks,
        "peak_gib": peak_gib(engine, METHODS[method]["attention"]),
        "resting_gib": resting,
        **(predicted(args, method, length) if ranks == 1 and METHODS[method]["attention"] == "dfa" else {}),
        "host_gib_of_all_ranks": host.item(),
        "loss": value if math.isfinite(value) else str(value),
        "loss_finite": math.isfinite(value),
    }


def predicted(args: argparse.Namespace, method: str, length: int) -> dict[str, Any]:
    """Return the memory of the account, GiB by moment, and the largest."""
    from benchmarks.deepspeed_common import TILE
    from benchmarks.deepspeed_memory import Step

    fields = settings(args, method)
    found = Step(
        shape=SHAPES[args.shape], layers=args.layers, vocabulary=VOCABULARIES[args.shape], tile=TILE,
        on_host=bool(fields.get("on_host")), offload=args.offload_optimizer, stages=fields["stages"],
        tiled=fields.get("tiled", False),
    ).account(length)  # fmt: skip
    return {"predicted_gib": max(found.values()), "predicted_by_moment": found}


def main() -> int:
    """Compare, search, and write after every attempt; 1 if something failed but for want of memory or time."""
    args = parse()
    if args.rank_of:
        rank_main(args)
        return 0
    import torch

    begin = time.perf_counter()
    ranks = args.gpus or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    about: dict[str, Any] = {
        "shape": args.shape,
        "note": f"{args.layers} layers" + (", and tiny" if args.dry_run else ""),
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "rank_of"},
    }
    compared = launch(args, ranks, "compare", 0, args.budget)
    about |= {key: value for key, value in compared.items() if key not in ("method", "length")}
    print(json.dumps(about), flush=True)
    if "failed" in compared:
        print("nothing is timed: the methods were not found to compute the same", file=sys.stderr)
        return 1
    about |= {"longest": {}, "results": []}

    def attempt(method: str, length: int, seconds: float) -> dict[str, Any]:
        result = launch(args, ranks, method, length, seconds)
        if "failed" not in result:
            about["longest"][method] = max(length, about["longest"].get(method, 0))
        about["results"].append(result)
        print(json.dumps(result), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(about, indent=2) + "\n")
        return result

    able = [method for method in args.methods if "refused" not in about["agreement"][method]]
    memory = args.memory_gib
    if memory is None and torch.cuda.is_available() and not args.dry_run:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    left = lambda: begin + args.budget - time.perf_counter()  # noqa: E731
    search(able, args.shortest, attempt, left, args.resolution, memory)
    failed = [one for one in about["results"] if not one.get("failed", MEMORY).startswith((MEMORY, STOPPED))]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
