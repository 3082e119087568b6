"""Times every schedule of the distributed attention on the GPUs of one host, after checking its answers.

    torchrun --nproc-per-node 4 benchmarks/schedules.py --seq-length 32768 131072 --kv-heads 32 8 --out schedules.json

Each configuration is compared with dense attention on a short sequence first; a wrong one is not timed. Times are CUDA
events, the median over repetitions of the slowest rank. TFLOP/s per GPU count the pairs of the causal mask only:
2 * N^2 * heads * head_dim / P forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.testing.compare import assert_close, dense_attention

SCHEDULES = ("balanced_shared", "balanced", "ring", "zigzag")


def main() -> None:
    """Check, time, and write one JSON file on rank 0."""
    args = _flags()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    rows = []
    for kernel in args.kernel:
        for kv_heads in args.kv_heads:
            for schedule in args.schedule:
                options = {"schedule": schedule, "kernel": kernel, "layout": _layout(schedule)}
                error = _check(args, kv_heads, options)
                for length in args.seq_length:
                    row = {**options, "kv_heads": kv_heads, "seq_length": length, "error": error}
                    row |= _time(args, length, kv_heads, options)
                    rows.append(row)
                    if dist.get_rank() == 0:
                        print(_line(row), flush=True)
    if dist.get_rank() == 0:
        _write(args, rows)
    dist.destroy_process_group()


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--schedule", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--kernel", nargs="+", default=["cudnn"])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", default="schedules.json")
    return parser.parse_args()


def _layout(schedule: str) -> str:
    return "zigzag" if schedule == "zigzag" else "contiguous"


def _inputs(args: argparse.Namespace, length: int, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and dout of a whole sequence, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(length + kv_heads)
    counts = (args.heads, kv_heads, kv_heads, args.heads)
    shape = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(1, length, count, args.head_dim, **shape) for count in counts]


def _check(args: argparse.Namespace, kv_heads: int, options: dict[str, Any]) -> float:
    """The largest relative error of out, dq, dk, dv on 512 tokens per rank; raises if it is not bfloat16's rounding."""
    ranks = dist.get_world_size()
    whole = _inputs(args, 512 * ranks, kv_heads)
    exact = [x.float().requires_grad_() for x in whole[:3]]
    out, _ = dense_attention(*exact, causal=True)
    wanted = [out.detach(), *torch.autograd.grad(out, exact, whole[3].double())]
    shard = [dfa_megatron.shard_sequence(x, layout=options["layout"]) for x in (*whole, *wanted)]
    inputs = [x.contiguous().requires_grad_() for x in shard[:3]]
    mine = dfa_megatron.dist_flash_attn_func(*inputs, **options)
    got = [mine.detach(), *torch.autograd.grad(mine, inputs, shard[3])]
    worst = 0.0
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, shard[4:], strict=True):
        assert_close(a, b, tolerance=1e-2, name=name)
        worst = max(worst, float((a.double() - b.double()).norm() / b.double().norm()))
    return worst


def _time(args: argparse.Namespace, length: int, kv_heads: int, options: dict[str, Any]) -> dict[str, float]:
    """Median milliseconds of the slowest rank, TFLOP/s per GPU and peak GiB."""
    ranks = dist.get_world_size()
    q, k, v, dout = _inputs(args, length // ranks, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def forward() -> torch.Tensor:
        out: torch.Tensor = dfa_megatron.dist_flash_attn_func(q, k, v, **options)
        return out

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), dout)

    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        forward_ms = _median(forward, args.repetitions)
    both_ms = _median(both, args.repetitions)
    peak = torch.cuda.max_memory_allocated() / 2**30
    flops = 2 * length**2 * args.heads * args.head_dim / ranks
    return {
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "both_tflops": 3.5 * flops / both_ms / 1e9,
        "peak_gib": peak,
    }


def _median(call: Any, repetitions: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['kernel']:8s} {row['schedule']:16s} N {row['seq_length']:7d} kv {row['kv_heads']:2d}  "
        f"forward {row['forward_ms']:8.2f} ms {row['forward_tflops']:5.0f}  both {row['both_ms']:8.2f} ms "
        f"{row['both_tflops']:5.0f} TFLOP/s  peak {row['peak_gib']:.1f} GiB  error {row['error']:.1e}"
    )


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "gpus": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
        "dfa_megatron": dfa_megatron.__version__,
        "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
    }
    Path(args.out).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
