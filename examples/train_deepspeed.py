"""Train a Hugging Face model on long texts with DeepSpeed; the JSON alone distributes attention.

A toy on two CPU ranks, and a model from the hub on eight GPUs (`torchrun --nproc-per-node` or `deepspeed --num_gpus`):

    torchrun --nproc-per-node 2 examples/train_deepspeed.py
    deepspeed --num_gpus 8 examples/train_deepspeed.py --deepspeed_config configs/deepspeed/zero3.json \\
        --model Qwen/Qwen3-8B --data book.txt --seq-length 131072
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from dfa_megatron import deepspeed as dfa_ds
from gpt.text import sample
from hf_model import add_arguments, build


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = add_arguments(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss of each step on the first rank."""
    args = parse()
    if not torch.cuda.is_available():  # DeepSpeed would compile an operator for inference at its first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model, tokens = build(args)
    engine, *_ = dfa_ds.initialize(args=args, model=model, model_parameters=list(model.parameters()))
    mesh = dfa_ds.mesh_of(engine)
    micro, index = engine.train_micro_batch_size_per_gpu(), 0
    for step in range(1, args.train_iters + 1):
        start, total = time.perf_counter(), torch.zeros((), device=engine.device)
        for _ in range(engine.gradient_accumulation_steps()):
            first = (index * mesh.data_size + mesh.data_rank) * micro  # each group of ranks has sequences of its own
            ids = sample(tokens, args.seq_length, seed=0, indices=range(first, first + micro))["tokens"]
            batch = dfa_ds.shard_batch(
                {"input_ids": ids.to(engine.device), "labels": ids.to(engine.device)}, group=mesh.group
            )
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
            index += 1
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            loss_value = total.item() / dist.get_world_size()
            print(f"step {step:4d}  loss {loss_value:.4f}  {time.perf_counter() - start:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
