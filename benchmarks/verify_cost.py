"""What comparing every call costs the host: attentions with verify on and off, in turn, on all ranks of a machine.

    torchrun --nproc-per-node 2 benchmarks/verify_cost.py --out verify.json

Host time is that of issuing a forward and a backward of 16 layers, for each layer, from an idle device. Results with
and without are compared to the bit first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron import DistAttentionConfig

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8192, 32, 8, 128
LAYERS, ROUNDS = 16, 25


def main() -> None:
    """Measure and print one row for each transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    ranks = dist.get_world_size()
    q, k, v = (
        torch.randn(1, TOKENS // ranks, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def attend(transport: str, verify: str) -> tuple[torch.Tensor, ...]:
        """Run a chain of layers, and one backward through all of them."""
        out, config = q, DistAttentionConfig(transport=transport, verify=verify, deterministic=True)
        for _ in range(LAYERS):
            found = dfa_megatron.dist_flash_attn_func(out, k, v, causal=True, config=config)
            assert isinstance(found, torch.Tensor)
            out = found
        return (out, *torch.autograd.grad(out.sum(), (q, k, v)))

    rows = []
    for transport in ("p2p", "copy_engine"):
        for one, other in zip(attend(transport, "on"), attend(transport, "off"), strict=True):
            assert torch.equal(one, other), "comparing calls changes no bit"
        taken: dict[str, list[float]] = {"on": [], "off": []}
        for turn in range(2 * ROUNDS):
            verify = ("on", "off")[turn % 2]
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            attend(transport, verify)
            taken[verify].append((time.perf_counter() - start) / LAYERS)
            torch.cuda.synchronize()
        on, off = (statistics.median(taken[verify]) * 1e3 for verify in ("on", "off"))
        rows.append({"transport": transport, "ranks": ranks, "host_ms_on": on, "host_ms_off": off, "more_ms": on - off})
    if dist.get_rank() == 0:
        for row in rows:
            print(json.dumps(row))
        if args.out:
            header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": TOKENS}
            args.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
