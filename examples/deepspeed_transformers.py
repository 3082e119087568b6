"""Train a transformers model with DeepSpeed: one block of its JSON distributes attention.

torchrun --nproc-per-node 2 examples/deepspeed_transformers.py               # a toy, on CPU ranks or one GPU each
deepspeed --num_gpus 8 examples/deepspeed_transformers.py --model Qwen/Qwen3-8B --data book.txt --seq-length 131072
"""

import argparse
import pydoc_data.topics
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dfa_megatron import deepspeed as dfa_ds
from step_log import StepLog, training_flops


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="of the hub, or a folder; a tiny Llama if left out")
    parser.add_argument("--data", help="a text file; Python's own manual if left out")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, help="ranks that share a sequence; all of them if left out")
    parser.add_argument("--deepspeed_config", help="DeepSpeed's JSON, in place of the settings below")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by DeepSpeed's launcher")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # at DeepSpeed's calls
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
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda},
        # DeepSpeed's own fused Adam is compiled at its first use; PyTorch's is not.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5 if args.model else 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "dist_flash_attention": {"enabled": True, "checkpoint": "remat", **({"size": args.size} if args.size else {})},
    }
    engine, *_ = dfa_ds.initialize(
        model=model, model_parameters=list(model.parameters()), config=args.deepspeed_config or settings
    )
    mesh = dfa_ds.mesh_of(engine)
    seen = args.seq_length * mesh.data_size  # tokens of a step
    flops = training_flops(model.config, parameters, seen, args.seq_length)
    log = StepLog(tokens=seen, flops=flops, tensorboard=args.tensorboard)
    for step in range(args.steps):
        start = (step * mesh.data_size + mesh.data_rank) * args.seq_length % (len(tokens) - args.seq_length)
        ids = tokens[start : start + args.seq_length][None].to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss  # the ranks of a group bring the same whole sequences
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss.detach_())
        log.step(loss / dist.get_world_size(), grad_norm=engine.get_global_grad_norm())
    dist.barrier()
    dist.destroy_process_group()


main()
