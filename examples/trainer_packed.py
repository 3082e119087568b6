"""Train a transformers model with its Trainer on packed documents, with DDP or FSDP2, and without DeepSpeed.

    torchrun --nproc-per-node 2 examples/trainer_packed.py                       # a toy, on CPU ranks or one GPU each
    torchrun --nproc-per-node 8 examples/trainer_packed.py --size 4 --fsdp --model Qwen/Qwen3-8B --data book.txt \\
        --seq-length 131072
"""

import argparse
import os
import pydoc_data.topics
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)  # fmt: skip

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="of the hub, or a folder; a tiny Llama if left out")
    parser.add_argument("--data", help="a text file; Python's own manual if left out")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of the longest document")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, help="ranks that share a pack; all of them if left out")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters; on GPUs")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    if args.tensorboard:  # where Trainer looks for it
        os.environ["TENSORBOARD_LOGGING_DIR"] = args.tensorboard
    text = Path(args.data).read_text() if args.data else str(pydoc_data.topics.topics)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    else:
        tiny = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=args.seq_length,
        )  # fmt: skip
        model, tokens = LlamaForCausalLM(tiny), list(text.encode())
    ends = [sum(args.seq_length // (1 + index % 7) for index in range(count)) for count in range(8 * args.steps + 1)]
    documents = [{"input_ids": tokens[lo:hi]} for lo, hi in pairwise(ends) if hi <= len(tokens)]
    settings = TrainingArguments(
        output_dir="runs/trainer",
        per_device_train_batch_size=4,  # documents, which the collator packs into one row
        max_steps=args.steps,
        learning_rate=1e-5 if args.model else 1e-3,
        fsdp="full_shard" if args.fsdp else None,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=1,
        save_strategy="no",
        report_to=["tensorboard"] if args.tensorboard else [],
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model, settings, train_dataset=documents, data_collator=DataCollatorWithFlattening())
    # `size` neighbouring ranks share each pack. Every rank is given the same data set.
    dfa_hf.distribute_trainer(trainer, size=args.size, config=TrainingConfig(checkpoint="remat"))
    trainer.train()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


main()
