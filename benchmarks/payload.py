"""What a helped pair's backward sends: delta or out. Times both with flash4, whose backward takes either.

    torchrun --nproc-per-node 4 benchmarks/payload.py --seq-length 32768 131072 --kv-heads 32 8 --out payload.json

Both are compared with dense attention first. Times are CUDA events around forward and backward, the median of the
slowest rank; the two take turns.
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
from dfa_megatron import kernels
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.testing.dense import assert_close, dense_attention

PAYLOADS = ("delta", "out")


def main() -> None:
    """Check, time, and write one JSON file on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--out", default="payload.json")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    rows = []
    for kv_heads in args.kv_heads:
        for payload in PAYLOADS:
            _check(payload, kv_heads)
        for length in args.seq_length:
            rows += _times(length, kv_heads, args.repetitions)
            if dist.get_rank() == 0:
                for row in rows[-len(PAYLOADS) :]:
                    print(row, flush=True)
    if dist.get_rank() == 0:
        facts = {"gpu": torch.cuda.get_device_name(), "gpus": dist.get_world_size(), "torch": torch.__version__}
        facts["p2p"] = "off" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "on"
        Path(args.out).write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _inputs(length: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(length + kv_heads)
    options: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(1, length, count, 128, **options) for count in (32, kv_heads, kv_heads, 32)]


def _both(payload: str, inputs: list[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) with that payload; the scale tells the two apart where plans are kept."""
    kernels.get("flash4").reads = payload  # type: ignore[assignment]
    scale = 128**-0.5 * (1 if payload == "delta" else 1 + 1e-9)
    out = dfa_megatron.dist_flash_attn_func(*inputs, kernel="flash4", schedule="balanced_shared", softmax_scale=scale)
    assert isinstance(out, torch.Tensor)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def _check(payload: str, kv_heads: int) -> None:
    whole = _inputs(512 * dist.get_world_size(), kv_heads)
    exact = [x.float().requires_grad_() for x in whole[:3]]
    out, _ = dense_attention(*exact, causal=True)
    wanted = [out.detach(), *torch.autograd.grad(out, exact, whole[3].double())]
    shards = [dfa_megatron.shard_sequence(x).contiguous() for x in (*whole, *wanted)]
    got = _both(payload, [x.requires_grad_() for x in shards[:3]], shards[3])
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, shards[4:], strict=True):
        assert_close(a, b, tolerance=1e-2, name=name)


def _times(length: int, kv_heads: int, repetitions: int) -> list[dict[str, Any]]:
    q, k, v, dout = _inputs(length // dist.get_world_size(), kv_heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    times: dict[str, list[float]] = {payload: [] for payload in PAYLOADS}
    sent = {}
    for repetition in range(repetitions + 2):
        for payload in PAYLOADS:
            COUNTERS.reset()
            dist.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            _both(payload, inputs, dout)
            end.record()
            end.synchronize()
            slowest = torch.tensor([start.elapsed_time(end), COUNTERS.backward_bytes / 2**20], device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if repetition >= 2:
                times[payload].append(float(slowest[0]))
            sent[payload] = float(slowest[1])
    flops = 3.5 * 2 * length**2 * 32 * 128 / dist.get_world_size()
    return [
        {
            "payload": payload,
            "seq_length": length,
            "kv_heads": kv_heads,
            "both_ms": statistics.median(times[payload]),
            "both_tflops": flops / statistics.median(times[payload]) / 1e9,
            "backward_mib_sent_most": sent[payload],
        }
        for payload in PAYLOADS
    ]


if __name__ == "__main__":
    main()
