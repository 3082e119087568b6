"""Times every block kernel that this GPU can use, after checking each against float64.

    python benchmarks/kernel_speed.py --length 4096 32768 --kv-heads 32 8 --head-dim 128 64 --out kernels.json
    python benchmarks/kernel_speed.py --sweep --length 16384 --kv-heads 32 --head-dim 128 --mask causal --out sweep.json

A kernel that is wrong is not timed. Times are CUDA events, the median over repetitions after a warm-up; kernels take
turns, so that a slow clock hits all of them. TFLOP/s count the pairs that the mask lets through: 4 * pairs * heads *
head_dim forward, 2.5 times that backward, whatever a kernel computes twice.

--sweep times the triton kernel's forward, dk and dv, and dq under a list of block sizes, to choose its table from: the
fastest are printed last, as the line of `triton_attention.LARGE`. Every one is compared with the first of its list, and
is not timed if it differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.kernel_trial import Trial, errors, passes, stopwatch, wrong
from dfa_megatron.kernels.triton import adapter as triton_attention
from dfa_megatron.plan.language.geometry import CAUSAL, FULL

MASKS = {"causal": CAUSAL, "full": FULL}
PACKAGES = ("torch", "triton", "flash-attn-4", "flash_attn_3", "flash-attn", "nvidia-cutlass-dsl", "quack-kernels")
Sizes = tuple[int, int, int, int]
Passes = dict[tuple[str, ...], Callable[[], object]]

SWEEP: dict[str, list[Sizes]] = {
    "forward": [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3),
        (64, 128, 4, 3), (64, 64, 4, 4), (256, 64, 8, 3),
    ],
    "dk_dv": [
        (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 4), (32, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 4),
        (64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
    ],
    "dq": [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 128, 8, 2), (64, 64, 4, 2),
        (64, 64, 4, 3), (128, 32, 8, 3),
    ],
}  # fmt: skip
"""(query rows, key rows, warps, stages): what compiles for compute capability 9.0 with few registers spilled."""


def main() -> None:
    """Check, time, print a line a row, and write one JSON file."""
    args = _flags()
    rows: list[dict[str, Any]] = []
    for head_dim, kv_heads, mask in itertools.product(args.head_dim, args.kv_heads, args.mask):
        shapes = [_shape(args.heads, kv_heads, head_dim, mask, length) for length in args.length]
        if args.sweep:
            _compile(shapes[0])
            rows += [row for shape in shapes for row in _sweep(shape, mask, args.repetitions)]
        else:
            usable = _usable(args.kernel, shapes[0])
            rows += [row for shape in shapes for row in _time(usable, shape, mask, args.repetitions)]
    if args.sweep:
        print(_best(rows))
    Path(args.out).write_text(json.dumps({"environment": _environment(), "rows": rows}, indent=1), encoding="utf-8")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--mask", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--kernel", nargs="+", default=["flash4", "flash3", "cudnn", "flash2", "aten", "triton"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", default="kernels.json")
    return parser.parse_args()


def _shape(heads: int, kv_heads: int, head_dim: int, mask: str, length: int) -> Trial:
    return Trial(
        q_len=length, kv_len=length, band=MASKS[mask], heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        head_dim_v=head_dim, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


def _usable(names: list[str], shape: Trial) -> list[kernels.BlockKernel]:
    """The kernels that take the shape and agree with float64 on a short sequence."""
    usable = []
    for name in names:
        kernel = kernels.get(name)
        if (why := kernel.refusal(shape.need())) is not None:
            print(f"{name:8} refuses: {why}", flush=True)
            continue
        found = errors(kernel, dataclasses.replace(shape, q_len=500, kv_len=500))
        if bad := wrong(found, shape.dtype):
            raise SystemExit(f"{name} is wrong in {', '.join(bad)}: {found}")
        usable.append(kernel)
    return usable


def _time(usable: list[kernels.BlockKernel], shape: Trial, mask: str, repetitions: int) -> list[dict[str, Any]]:
    inputs = shape.inputs(shape.q_len)
    calls: Passes = {}
    for kernel in usable:
        for phase, call in passes(kernel, shape, inputs).items():
            calls[kernel.name, phase] = call
    seconds = _medians(calls, repetitions)
    rows = []
    for kernel in usable:
        row: dict[str, Any] = {"kernel": kernel.name, **_described(shape, mask)}
        for phase in ("forward", "backward"):
            row[f"{phase}_ms"] = 1e3 * seconds[kernel.name, phase]
            row[f"{phase}_tflops"] = shape.operations(phase) / seconds[kernel.name, phase] / 1e12
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def _described(shape: Trial, mask: str) -> dict[str, Any]:
    return {
        "head_dim": shape.head_dim, "heads": shape.heads, "kv_heads": shape.kv_heads, "mask": mask,
        "length": shape.q_len,
    }  # fmt: skip


def _launches(shape: Trial) -> Callable[[str, Sizes], tuple[torch.Tensor, ...]]:
    """A function that runs one part of the triton kernel under some sizes."""
    from dfa_megatron.kernels.triton import backward as triton_backward
    from dfa_megatron.kernels.triton import call as triton_call
    from dfa_megatron.kernels.triton import forward as triton_forward
    from dfa_megatron.kernels.triton.support import Diagonals

    q, k, v, dout = shape.inputs(shape.q_len)
    diagonals, scale = Diagonals.of(shape.band, shape.q_len, shape.kv_len), shape.softmax_scale
    lse = torch.full((1, shape.heads, shape.q_len), 10.0, device="cuda")
    call = triton_call.Call(dout, q, k, v, lse, torch.zeros_like(lse), diagonals, scale)

    def launch(part: str, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        if part == "forward":
            return triton_forward.launch(q, k, v, diagonals, scale, sizes)
        return (
            triton_backward.launch_dk_dv(call, sizes) if part == "dk_dv" else (triton_backward.launch_dq(call, sizes),)
        )

    return launch


def _compile(shape: Trial) -> None:
    """Fill Triton's cache on disk with every candidate, in several processes."""
    candidates = [(shape, part, sizes) for part, several in SWEEP.items() for sizes in several]
    workers = min(8, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for why in pool.map(_compile_one, candidates):
            if why:
                print(why, flush=True)


def _compile_one(candidate: tuple[Trial, str, Sizes]) -> str:
    shape, part, sizes = candidate
    short = dataclasses.replace(shape, q_len=1024, kv_len=1024)
    try:
        _launches(short)(part, sizes)
    except Exception as error:  # noqa: BLE001 -- Triton's own, when shared memory is too small
        return f"{part} {sizes} is left out: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return ""


def _sweep(shape: Trial, mask: str, repetitions: int) -> list[dict[str, Any]]:
    """The triton kernel under other block sizes; what does not fit the chip, or differs, is left out."""
    launch = _launches(shape)
    calls: Passes = {}
    for part, several in SWEEP.items():
        first: tuple[torch.Tensor, ...] | None = None
        for sizes in several:
            try:
                results = launch(part, sizes)
            except Exception:  # noqa: BLE001, S112 -- said by _compile
                continue
            first = first or results
            for x, y in zip(results, first, strict=True):
                if not float((x.float() - y.float()).norm()) <= 0.01 * float(y.float().norm()):
                    raise SystemExit(f"{part} under {sizes} is not what it is under {several[0]}")
            calls[part, str(sizes)] = functools.partial(launch, part, sizes)
    rows: list[dict[str, Any]] = []
    share = {"forward": 1.0, "dk_dv": 2.0, "dq": 1.5}
    for (part, sizes_text), seconds in _medians(calls, repetitions).items():
        tflops = share[part] * shape.operations("forward") / seconds / 1e12
        print(
            f"{part:8}{sizes_text:20}{_text(_described(shape, mask))}{1e3 * seconds:9.3f} ms{tflops:7.0f}", flush=True
        )
        rows.append(
            {"part": part, "sizes": sizes_text, "ms": 1e3 * seconds, "tflops": tflops, **_described(shape, mask)}
        )
    return rows


def _best(rows: list[dict[str, Any]]) -> str:
    """For each head_dim, the sizes whose rates over all timed shapes have the largest mean, beside those in use."""
    lines = [
        "",
        "best, as lines of triton_attention.LARGE[2]; TFLOP/s, means over the shapes, against the sizes in use:",
    ]
    for head_dim in sorted({row["head_dim"] for row in rows}):
        chosen, beside = [], []
        known = next(sizes for limit, sizes in triton_attention.LARGE[2].items() if head_dim <= limit)
        for part in SWEEP:
            rates: dict[str, list[float]] = {}
            for row in rows:
                if row["part"] == part and row["head_dim"] == head_dim:
                    rates.setdefault(row["sizes"], []).append(row["tflops"])
            if not rates:
                continue
            means = {sizes: statistics.mean(values) for sizes, values in rates.items()}
            best = max(means, key=means.__getitem__)
            in_use = means.get(str(getattr(known, part)))
            chosen.append(best)
            beside.append(f"{part} {means[best]:.0f} against {'-' if in_use is None else format(in_use, '.0f')}")
        lines.append(f"    {head_dim}: Sizes({', '.join(chosen)}),    # {', '.join(beside)}")
    return "\n".join(lines)


def _medians(calls: Passes, repetitions: int) -> dict[tuple[str, ...], float]:
    """Median seconds of each pass, the passes taking turns."""
    times: dict[tuple[str, ...], list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 2):
        for name, call in calls.items():
            seconds = stopwatch(call, torch.device("cuda"))
            if repetition >= 2:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def _line(row: dict[str, Any]) -> str:
    return f"{row['kernel']:8}{_text(row)}{row['forward_tflops']:6.0f} /{row['backward_tflops']:5.0f} TFLOP/s"


def _text(row: dict[str, Any]) -> str:
    return f"{row['head_dim']:>4}{row['heads']:>4}:{row['kv_heads']:<3}{row['length']:>7} {row['mask']:7}"


def _environment() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    large = triton_attention.LARGE
    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions,
        "triton_sizes": {size: {d: dataclasses.asdict(s) for d, s in by.items()} for size, by in large.items()},
    }


if __name__ == "__main__":
    main()
