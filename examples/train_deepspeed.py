"""Trains a Hugging Face model on long texts with DeepSpeed; that attention is distributed is said in the JSON alone.

A toy on two CPU ranks, and a model from the hub on eight GPUs (`torchrun --nproc-per-node` or `deepspeed --num_gpus`):

    torchrun --nproc-per-node 2 examples/train_deepspeed.py
    deepspeed --num_gpus 8 examples/train_deepspeed.py --deepspeed_config configs/deepspeed/zero3.json \\
        --model Qwen/Qwen3-8B --data book.txt --seq-length 131072
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dfa_megatron import deepspeed as dfa_ds
from gpt.text import Tokens, open_tokens, sample


class _Encoded:
    """A text in the tokens of a model's own tokenizer."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        self.name, self.vocabulary = path, len(tokenizer)
        self._ids = torch.tensor(tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"])

    def __len__(self) -> int:
        return len(self._ids)

    def window(self, start: int, length: int) -> torch.Tensor:
        return self._ids[start : start + length]


def parse() -> argparse.Namespace:
    """The command line; launchers add --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or path of a causal language model; a tiny new Llama if left out")
    parser.add_argument("--data", help="a text file; Python's language reference if left out")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--train-iters", type=int, default=40)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    args = parser.parse_args()
    if args.model and not args.data:
        parser.error("--model needs --data, a text for its tokenizer")
    return args


def build(args: argparse.Namespace) -> tuple[Any, Tokens]:
    """The model and the tokens to train on; nothing in either knows of distributed attention."""
    torch.manual_seed(0)
    if args.model:
        encoded = _Encoded(args.data, AutoTokenizer.from_pretrained(args.model))
        if len(encoded) <= args.seq_length:
            raise SystemExit(f"{args.data} has {len(encoded)} tokens, fewer than --seq-length {args.seq_length} needs")
        return AutoModelForCausalLM.from_pretrained(args.model), encoded
    tokens = open_tokens(args.data, vocab_size=None, seq_length=args.seq_length)
    config = LlamaConfig(
        vocab_size=tokens.vocabulary,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=args.seq_length,
    )
    return LlamaForCausalLM(config), tokens


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
