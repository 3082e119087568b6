"""Train a transformers model in a loop around accelerate, with FSDP2 or DDP, and without DeepSpeed or Trainer.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py                     # a toy with DDP, on CPU ranks
    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
        --mixed_precision bf16 examples/accelerate_fsdp2.py --size 4 --model Qwen/Qwen3-8B --data book.txt \\
        --seq-length 131072
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf
from step_log import StepLog, training_flops


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="of the hub, or a folder; a tiny Llama if left out")
    parser.add_argument("--data", help="a text file; Python's own manual if left out")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, help="ranks that share a sequence; all of them if left out")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    text = Path(args.data).read_text() if args.data else str(pydoc_data.topics.topics)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
    else:
        tiny = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=args.seq_length,
        )  # fmt: skip
        model, tokens = LlamaForCausalLM(tiny), torch.tensor(list(text.encode()))
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    accelerator = Accelerator(
        cpu=not cuda, log_with="tensorboard" if args.tensorboard else None, project_dir=args.tensorboard
    )
    accelerator.init_trackers("accelerate")
    # First of all: from here on `num_processes`, loaders and `gather` count groups of ranks that share a sequence.
    options = TrainingConfig(checkpoint="remat", loss_tile=4096)
    dfa_hf.distribute_accelerator(accelerator, model, size=args.size, config=options)
    rows = [{"input_ids": row, "labels": row} for row in tokens.split(args.seq_length)[:-1]]
    loader = torch.utils.data.DataLoader(rows, batch_size=1, shuffle=True)  # the same on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = args.seq_length * accelerator.num_processes
    flops = training_flops(
        model.config if hasattr(model, "config") else model.module.config, parameters, seen, args.seq_length
    )
    log, step = StepLog(tokens=seen, flops=flops), 0
    while step < args.steps:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log(log.step(accelerator.reduce(loss.detach(), "mean"), grad_norm=norm), step=step)
            step += 1
            if step == args.steps:
                break
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)  # before its group ends
    accelerator.end_training()


main()
