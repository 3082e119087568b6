"""Time two trees of this project on one GPU: forward and backward of the same attentions, in alternating runs.

    git worktree add /tmp/before 42e8fcf
    python benchmarks/before_after.py /tmp/before . --out before_after.json
    python benchmarks/before_after.py /tmp/before . --device cpu --lengths 256 --short 64 --heads 4 --kv-heads 2

Each tree has one process that lives as long as the benchmark, and the two take turns: before, after, before, ... A run
repeats a case for `--seconds` and gives the median. The report has the median of the runs of each tree and the ratio
after / before. Cases:

    causal N, pack N    the public functions on one rank, N rows
    ranks P, N          the programs of P ranks over N rows, all in one process without a network: many steps
    short N             the public function on few rows; its host time is until the call returns, from an idle device

`out_equal` says whether the two trees give the same out to the bit, on inputs of the same seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], torch.Tensor]
"""A forward and its backward; returns out."""


def main() -> int:
    """Let both trees take turns, print and write the report."""
    args = arguments()
    if args.worker:
        return work(args)
    trees = {"before": args.before, "after": args.after}
    workers = {name: start(tree) for name, tree in trees.items()}
    rows = []
    for case in cases(args):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for turn in range(args.rounds):
            for name in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                runs[name].append(ask(workers[name], case))
        rows.append(summary(case, runs))
        print(line(rows[-1]), flush=True)
    about = {name: ask(worker, "about") for name, worker in workers.items()}
    for worker in workers.values():
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait(timeout=60)
    if args.out:
        given = {name: str(value) for name, value in vars(args).items()}
        args.out.write_text(json.dumps({"arguments": given, "trees": about, "rows": rows}, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    """Return the command line; a worker is started with the same one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a tree: a folder with dfa_megatron in it")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072], help="rows of long sequences")
    parser.add_argument("--short", type=int, default=512, help="rows of the short one")
    parser.add_argument("--ranks", type=int, default=8, help="of the case with many steps; over the first length")
    parser.add_argument("--schedule", default="balanced_shared", help="of the same")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each tree")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a run")
    parser.add_argument("--out", type=Path, help="where the report goes as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def cases(args: argparse.Namespace) -> list[str]:
    """Return the cases, each a name and a number."""
    long = [f"{kind} {length}" for length in args.lengths for kind in ("causal", "pack")]
    return [f"short {args.short}", *long, f"ranks {args.lengths[0]}"]


def start(tree: Path) -> subprocess.Popen[str]:
    """Start a worker that imports that tree."""
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker"]
    return subprocess.Popen(  # noqa: S603 -- this script
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
    )


def ask(worker: subprocess.Popen[str], case: str) -> dict[str, Any]:
    """Return a worker's answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(case, file=worker.stdin, flush=True)
    for text in worker.stdout:
        if text.startswith("{"):  # other lines are those of libraries
            return json.loads(text)  # type: ignore[no-any-return]
    raise RuntimeError(f"{case}: a worker ended with status {worker.wait()}")


def summary(case: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the runs, ratios, and the runs."""
    row: dict[str, Any] = {"case": case, "out_equal": len({run["out"] for each in runs.values() for run in each}) == 1}
    for name in ("ms", "host_ms"):
        before, after = (statistics.median(run[name] for run in runs[tree]) for tree in ("before", "after"))
        row[name] = {"before": before, "after": after, "ratio": after / before}
    return row | {"runs": runs}


def line(row: dict[str, Any]) -> str:
    """Format a row."""
    parts = [
        f"{name} {row[name]['before']:.3f} -> {row[name]['after']:.3f} ({row[name]['ratio']:.4f})"
        for name in ("ms", "host_ms")
    ]
    return f"{row['case']:16} {'  '.join(parts)}  out {'equal' if row['out_equal'] else 'DIFFERS'}"


def work(args: argparse.Namespace) -> int:
    """Serve the cases that come in, one answer a line."""
    steps: dict[str, Step] = {}
    for text in sys.stdin:
        case = text.strip()
        if case == "about":
            answer = about()
        else:
            if case not in steps:
                steps.clear()  # and the inputs of the last case with it
                kind, length = case.split()
                steps[case] = {"ranks": ranks}.get(kind, one_rank)(args, kind, int(length))
            answer = timed(steps[case], args.device, args.seconds)
        print(json.dumps(answer), flush=True)
    return 0


def about() -> dict[str, Any]:
    """Return the tree and the machine of a worker."""
    import dfa_megatron

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    took = [one.kernel.name for one in prepared_here()]
    return {"tree": dfa_megatron.__file__, "torch": torch.__version__, "device": device, "kernels": sorted(set(took))}


def timed(step: Step, device: str, seconds: float) -> dict[str, Any]:
    """Return medians of a run: milliseconds until the device is done, and until the call has returned."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        out = step()
    whole: list[float] = []
    host: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(whole) < 5:
        synchronize()
        begin = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - begin))
        synchronize()
        whole.append(1e3 * (time.perf_counter() - begin))
    digest = hashlib.sha256(out.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
    return {"ms": statistics.median(whole), "host_ms": statistics.median(host), "repeated": len(whole), "out": digest}


def one_rank(args: argparse.Namespace, kind: str, length: int) -> Step:
    """Return a step of the public functions; torch.distributed is not initialised."""
    from dfa_megatron import dist_flash_attn_func, dist_flash_attn_varlen_func

    q, k, v, dout = inputs(args, length)
    given = options(dist_flash_attn_func, kernel=args.kernel)
    if kind == "pack":
        q, k, v, dout = (x[0].detach().requires_grad_(x.requires_grad) for x in (q, k, v, dout))
        offsets = (0, length // 16, length // 16 + 1, length // 4, length // 2, length - 3, length)

    def step() -> torch.Tensor:
        if kind == "pack":
            out: Any = dist_flash_attn_varlen_func(q, k, v, offsets, causal=True, **given)
        else:
            out = dist_flash_attn_func(q, k, v, causal=True, **given)
        torch.autograd.grad(out, (q, k, v), dout)
        return out  # type: ignore[no-any-return]

    return step


def ranks(args: argparse.Namespace, kind: str, length: int) -> Step:
    """Return a step that runs every rank's program in this process, one step of each in turn."""
    from dfa_megatron import dist_flash_attn_func

    together = first_of("tests.support.together", "dfa_megatron.runtime.together")
    q, k, v, dout = (x.detach() for x in inputs(args, length))
    given = options(dist_flash_attn_func, kernel=args.kernel)
    dist_flash_attn_func(q, k, v, causal=True, **given)  # makes a request, whatever its form is in this tree
    changes = {"schedule": args.schedule, "ulysses_degree": 1}
    request = prepared_here()[-1].request
    own = {field.name for field in dataclasses.fields(request)}
    if "config" in own:
        request = dataclasses.replace(request, config=dataclasses.replace(request.config, **changes))
    else:
        request = dataclasses.replace(request, **changes)
    shards = [[x.contiguous() for x in whole.chunk(args.ranks, 1)] for whole in (q, k, v, dout)]
    prepared = together.prepare_together(request, *shards[:3])

    def step() -> torch.Tensor:
        found = together.forward_together(prepared, *shards[:3])
        out, lse = ([pair[at] for pair in found] for at in (0, 1))
        together.backward_together(prepared, shards[3], *shards[:3], out, lse)
        return torch.cat(out, 1)

    return step


def inputs(args: argparse.Namespace, length: int) -> list[torch.Tensor]:
    """Return q, k, v and dout, the same in both trees."""
    generator = torch.Generator(args.device).manual_seed(1)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    drawn = [
        torch.randn(1, length, heads, args.head_dim, generator=generator, device=args.device, dtype=dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    ]
    return [x.requires_grad_() for x in drawn[:3]] + drawn[3:]


def options(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Options as this tree's function takes them: one by one, or as a config."""
    if "config" not in inspect.signature(function).parameters:
        return given
    from dfa_megatron import DistAttentionConfig

    return {"config": DistAttentionConfig(**given)}


def prepared_here() -> tuple[Any, ...]:
    """Return the prepared requests of this process, the last at the end."""
    runtime = first_of("dfa_megatron.runtime.prepare", "dfa_megatron.runtime.prepared")
    return runtime.in_use()  # type: ignore[no-any-return]


def first_of(*modules: str) -> Any:
    """Import the first of the modules that this tree has."""
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(modules)}")


if __name__ == "__main__":
    sys.exit(main())
