"""Proves a Llama-shaped model in bfloat16 under ZeRO-3 on all GPUs, then with a planted fault, and says what it took.

    torchrun --nproc-per-node 2 -m benchmarks.prove_seconds --kernel flash4 --out FILE

The fault is one head of the last token that attention leaves 0. The exit status is 1 if a proof says what is not so.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers

from benchmarks.deepspeed_common import config_of, device, join, made_with, optimizer
from benchmarks.deepspeed_shapes import SHAPES
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import ProofError
from dfa_megatron.huggingface import attention_function


def engine_of(args: argparse.Namespace) -> Any:
    """Return a ZeRO-3 engine around a new model."""
    shape = SHAPES["llama-3-8b"].toy() if args.dry_run else SHAPES["llama-3-8b"]
    config = config_of(shape, layers=args.layers, vocabulary=128 if args.dry_run else 32768, longest=8192)
    torch.manual_seed(0)
    with torch.device(device()):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": optimizer(False, args.dry_run)[0],
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3},
        "dist_flash_attention": {"enabled": True, "kernel": args.kernel},
    }
    return dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def lossy(real: Any) -> Any:
    """Return a function of attention that gives 0 for the first head of the last rank's last token."""

    def lost(*args: Any, **kw: Any) -> torch.Tensor:
        out: torch.Tensor = real(*args, **kw)  # (..., tokens, heads, head_dim)
        kept = torch.ones((*out.shape[-3:-1], 1), dtype=out.dtype, device=out.device)
        kept[-1, 0] = float(dist.get_rank() < dist.get_world_size() - 1)
        return out * kept

    return lost


def main() -> None:
    """Prove twice, and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on a CPU too")
    args = parser.parse_args()
    join(300.0)
    report = {**made_with(), "arguments": {name: str(value) for name, value in vars(args).items()}}
    begin = time.perf_counter()
    engine = engine_of(args)
    report["seconds_to_build"] = time.perf_counter() - begin
    proof = dfa_ds.prove(engine)
    report |= {"seconds": proof.seconds, "proof": str(proof).splitlines()}
    names = ("dist_flash_attn_func", "dist_flash_attn_varlen_func")
    try:
        with patch.multiple(attention_function, **{name: lossy(getattr(attention_function, name)) for name in names}):
            dfa_ds.prove(engine)
    except ProofError as error:
        report["planted"] = str(error).splitlines()
    if dist.get_rank() == 0:
        print(json.dumps(report, indent=1), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit("planted" not in report)


if __name__ == "__main__":
    main()
