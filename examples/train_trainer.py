"""Train a Hugging Face model on long texts with HF Trainer; the JSON distributes attention.

A toy on two CPU ranks, and a model from the hub on eight GPUs, two sequences at a time (`torchrun --nproc-per-node` or
`deepspeed --num_gpus`):

    torchrun --nproc-per-node 2 examples/train_trainer.py
    deepspeed --num_gpus 8 examples/train_trainer.py --sp-size 4 --model Qwen/Qwen3-8B --data book.txt \\
        --seq-length 131072
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import Trainer, TrainingArguments

from dfa_megatron import deepspeed as dfa_ds
from gpt.text import Tokens, sample
from hf_model import add_arguments, build


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Yield whole sequences; accelerate's loader gives each rank its part of each."""

    def __init__(self, tokens: Tokens, seq_length: int, count: int) -> None:
        self.tokens, self.seq_length, self.count = tokens, seq_length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = sample(self.tokens, self.seq_length, seed=0, indices=[index])["tokens"][0]
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(self.seq_length)}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = add_arguments(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    parser.add_argument("--sp-size", type=int, help="ranks that share a sequence; all of them if left out")
    parser.add_argument("--deepspeed_config", default=str(Path(__file__).with_suffix(".json")))
    parser.add_argument("--output-dir", default="runs/trainer")
    return parser.parse_args()


def main() -> None:
    """Train, and let Trainer print the loss of each step."""
    args = parse()
    if not torch.cuda.is_available():  # DeepSpeed would compile an operator for inference at its first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dfa_ds.install()
    ranks = int(os.environ["WORLD_SIZE"])
    size = args.sp_size or ranks
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        deepspeed=args.deepspeed_config,
        parallelism_config=ParallelismConfig(
            sp_size=size,
            dp_replicate_size=ranks // size,
            sp_backend="deepspeed",
            sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
        ),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=1,
        max_steps=args.train_iters,
        learning_rate=1e-5 if args.model else 3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model, tokens = build(args)
    windows = Windows(tokens, args.seq_length, ranks * args.train_iters)
    Trainer(model=model, args=arguments, train_dataset=windows).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
