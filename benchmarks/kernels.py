"""Times every block kernel that this GPU can use, after checking each against float64.

    python benchmarks/kernels.py --length 4096 32768 --kv-heads 32 8 --head-dim 128 64 --out kernels.json

A kernel that is wrong is not timed. Times are CUDA events, the median over repetitions after a warm-up; kernels take
turns, so that a slow clock hits all of them. TFLOP/s count the pairs that the mask lets through: 4 * pairs * heads *
head_dim forward, 2.5 times that backward, whatever a kernel computes twice.

--sweep times the triton kernel's forward, dk and dv, and dq under a list of block sizes, to choose its table from.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dfa_megatron import kernels
from dfa_megatron.kernels.api import BlockKernel, Need, Saved
from dfa_megatron.plan.geometry import CAUSAL, FULL, Band
from dfa_megatron.testing.compare import assert_close, dense_attention

MASKS = {"causal": CAUSAL, "full": FULL}
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

SWEEP = {
    "forward": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 128, 4, 2)],
    "dk_dv": [(64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 8, 3), (32, 64, 4, 3), (128, 128, 8, 1)],
    "dq": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)],
}
"""(query rows, key rows, warps, stages)."""


def main() -> None:
    """Check, time, print a line a row, and write one JSON file."""
    args = _flags()
    rows: list[dict[str, Any]] = []
    shapes = list(itertools.product(args.head_dim, args.kv_heads, args.mask))
    for head_dim, kv_heads, mask in shapes:
        if args.sweep:
            for length in args.length:
                rows += _sweep(args, head_dim, kv_heads, mask, length)
            continue
        usable = _usable(args, head_dim, kv_heads, mask)
        for length in args.length:
            rows += _time(args, usable, head_dim, kv_heads, mask, length)
    Path(args.out).write_text(json.dumps({"environment": _environment(), "rows": rows}, indent=1), encoding="utf-8")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--mask", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--kernel", nargs="+", default=["flash4", "cudnn", "aten", "triton"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", default="kernels.json")
    return parser.parse_args()


def _inputs(heads: int, kv_heads: int, head_dim: int, length: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(length + 100 * kv_heads + head_dim)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(1, length, count, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)

    return draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)


def _saved(kernel: BlockKernel, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Saved:
    if kernel.reads == "out":
        return Saved(lse, out=out)
    return Saved(lse, delta=(dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous())


def _usable(args: argparse.Namespace, head_dim: int, kv_heads: int, mask: str) -> list[BlockKernel]:
    """The kernels that take the shape and agree with float64 on a short sequence."""
    form: Any = "causal" if mask == "causal" else "full"
    need = Need(
        "cuda", torch.bfloat16, args.heads, kv_heads, head_dim, head_dim, frozenset({form}),
        capability=torch.cuda.get_device_capability(),
    )  # fmt: skip
    usable = []
    for name in args.kernel:
        why = kernels.get(name).refusal(need)
        if why is None:
            _check(kernels.get(name), args.heads, kv_heads, head_dim, MASKS[mask])
            usable.append(kernels.get(name))
        else:
            print(f"{name:8} refuses: {why}", flush=True)
    return usable


def _check(kernel: BlockKernel, heads: int, kv_heads: int, head_dim: int, band: Band) -> None:
    q, k, v, dout = _inputs(heads, kv_heads, head_dim, 500)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scale = 1 / math.sqrt(head_dim)
    want, want_lse = dense_attention(*leaves, window_size=(band.left, band.right))
    wanted = [want.detach(), want_lse.detach(), *torch.autograd.grad(want, leaves, dout.double())]
    out, lse = kernel.forward(q, k, v, band=band, softmax_scale=scale)
    gradients = kernel.backward(
        dout, q, k, v, _saved(kernel, dout, out, lse), band=band, softmax_scale=scale, deterministic=False
    )
    for name, got, exact in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), wanted, strict=True):
        assert_close(got, exact, tolerance=1e-2, name=f"{kernel.name} {name}")


def _time(
    args: argparse.Namespace, usable: list[BlockKernel], head_dim: int, kv_heads: int, mask: str, length: int
) -> list[dict[str, Any]]:
    q, k, v, dout = _inputs(args.heads, kv_heads, head_dim, length)
    call: dict[str, Any] = {"band": MASKS[mask], "softmax_scale": 1 / math.sqrt(head_dim)}
    passes: dict[tuple[str, str], Callable[[], object]] = {}
    for kernel in usable:
        saved = _saved(kernel, dout, *kernel.forward(q, k, v, **call))

        def forward(kernel: BlockKernel = kernel) -> object:
            return kernel.forward(q, k, v, **call)

        def backward(kernel: BlockKernel = kernel, saved: Saved = saved) -> object:
            return kernel.backward(dout, q, k, v, saved, **call, deterministic=False)

        passes[kernel.name, "forward"], passes[kernel.name, "backward"] = forward, backward
    milliseconds = _medians(passes, args.repetitions)
    rows = []
    for kernel in usable:
        row: dict[str, Any] = {
            "kernel": kernel.name, "head_dim": head_dim, "heads": args.heads, "kv_heads": kv_heads, "mask": mask,
            "length": length,
        }  # fmt: skip
        for what, factor in (("forward", 1.0), ("backward", 2.5)):
            row[f"{what}_ms"] = milliseconds[kernel.name, what]
            row[f"{what}_tflops"] = factor * _flops(args.heads, head_dim, mask, length) / row[f"{what}_ms"] / 1e9
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def _sweep(args: argparse.Namespace, head_dim: int, kv_heads: int, mask: str, length: int) -> list[dict[str, Any]]:
    """The triton kernel under other block sizes; what does not fit the chip is left out."""
    from dfa_megatron.kernels import triton_backward, triton_forward
    from dfa_megatron.kernels.triton_support import Diagonals

    q, k, v, dout = _inputs(args.heads, kv_heads, head_dim, length)
    lse = torch.full((1, args.heads, length), 10.0, device="cuda")
    diagonals, scale = Diagonals.of(MASKS[mask], length, length), 1 / math.sqrt(head_dim)
    call = triton_backward.Call(dout, q, k, v, lse, torch.zeros_like(lse), diagonals, scale)

    def launch(part: str, sizes: tuple[int, ...]) -> object:
        if part == "forward":
            return triton_forward.launch(q, k, v, diagonals, scale, sizes)
        return (triton_backward.launch_dk_dv if part == "dk_dv" else triton_backward.launch_dq)(call, sizes)

    passes: dict[tuple[str, str], Callable[[], object]] = {}
    for part, sizes in ((part, sizes) for part, several in SWEEP.items() for sizes in several):
        try:
            launch(part, sizes)
            passes[part, str(sizes)] = functools.partial(launch, part, sizes)
        except Exception as error:  # noqa: BLE001 -- Triton's own, when shared memory is too small
            print(f"{part} {sizes}: {type(error).__name__}", flush=True)
    rows: list[dict[str, Any]] = []
    flops = {"forward": 1.0, "dk_dv": 2.0, "dq": 1.5}
    shape = {"head_dim": head_dim, "heads": args.heads, "kv_heads": kv_heads, "mask": mask, "length": length}
    for (part, chosen), ms in _medians(passes, args.repetitions).items():
        tflops = flops[part] * _flops(args.heads, head_dim, mask, length) / ms / 1e9
        print(f"{part:8}{chosen:20}{head_dim:>5}{kv_heads:>4}{length:>8} {mask:7}{ms:9.3f} ms{tflops:7.0f}", flush=True)
        rows.append({"part": part, "sizes": chosen, "ms": ms, "tflops": tflops, **shape})
    return rows


def _flops(heads: int, head_dim: int, mask: str, length: int) -> float:
    """Of a forward: two matrix products over the pairs of the mask."""
    return (2.0 if mask == "causal" else 4.0) * length**2 * heads * head_dim


def _medians(passes: dict[tuple[str, str], Callable[[], object]], repetitions: int) -> dict[tuple[str, str], float]:
    """Median milliseconds of each pass, the passes taking turns."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in passes}
    for repetition in range(repetitions + 2):
        for name, run in passes.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if repetition >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def _line(row: dict[str, Any]) -> str:
    shape = f"{row['head_dim']:>4}{row['heads']:>4}:{row['kv_heads']:<3}{row['length']:>7} {row['mask']:7}"
    return f"{row['kernel']:8}{shape}{row['forward_tflops']:6.0f} /{row['backward_tflops']:5.0f} TFLOP/s"


def _environment() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    from dfa_megatron.kernels.triton_attention import LARGE

    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions,
        "triton_sizes": {size: {d: dataclasses.asdict(s) for d, s in by.items()} for size, by in LARGE.items()},
    }


if __name__ == "__main__":
    main()
