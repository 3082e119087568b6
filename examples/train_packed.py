"""Train a Hugging Face model on packed documents with HF Trainer, DDP or FSDP2, and without DeepSpeed.

A toy on two CPU ranks, and a model from the hub on eight GPUs, two packs at a time:

    torchrun --nproc-per-node 2 examples/train_packed.py
    torchrun --nproc-per-node 8 examples/train_packed.py --size 4 --fsdp --model Qwen/Qwen3-8B --data book.txt \\
        --seq-length 131072
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf
from gpt.text import Tokens, sample
from hf_model import add_arguments, build


class Documents(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Yield documents of many lengths; the collator packs those of a batch into one row."""

    def __init__(self, tokens: Tokens, longest: int, count: int) -> None:
        self.tokens, self.longest, self.count = tokens, longest, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = self.longest // (1 + index % 7)
        return {"input_ids": sample(self.tokens, self.longest, seed=0, indices=[index])["tokens"][0, :length].tolist()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = add_arguments(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    parser.add_argument("--size", type=int, help="ranks that share a sequence; all of them if left out")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters; on GPUs only")
    parser.add_argument("--output-dir", default="runs/packed")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> Any:
    """Train, let Trainer print the loss of each step, and return it."""
    model, tokens = build(args)
    settings = TrainingArguments(
        output_dir=args.output_dir,
        fsdp=args.fsdp or None,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=args.train_iters,
        learning_rate=1e-5 if args.model else 3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=Documents(tokens, args.seq_length, 64 * args.train_iters),
        data_collator=DataCollatorWithFlattening(),
    )
    dfa_hf.distribute_trainer(trainer, size=args.size, config=TrainingConfig(checkpoint="remat"))
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(parse())
    dist.barrier()
    dist.destroy_process_group()
