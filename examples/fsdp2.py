"""Train a transformers model with PyTorch alone: FSDP2 over a mesh (dp x cp), attention over its cp ranks.

torchrun --nproc-per-node 4 examples/fsdp2.py --context-parallel-size 2         # a toy, on CPU ranks or one GPU each
torchrun --nproc-per-node 8 examples/fsdp2.py --context-parallel-size 4 --model Qwen/Qwen3-8B --seq-length 131072
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf
from step_log import StepLog, training_flops


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="of the hub, or a folder; a tiny Llama if left out")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--context-parallel-size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group()
    data = dist.get_world_size() // args.context_parallel_size
    mesh = init_device_mesh(device, (data, args.context_parallel_size), mesh_dim_names=("dp", "cp"))
    group = mesh["cp"].get_group()
    text = str(pydoc_data.topics.topics)  # Python's own manual
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
    else:
        tiny = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=args.seq_length,
        )  # fmt: skip
        model, tokens = LlamaForCausalLM(tiny), torch.tensor(list(text.encode()))
    seen = data * args.accumulate * args.seq_length  # tokens of a step
    flops = training_flops(model.config, model.num_parameters(exclude_embeddings=True), seen, args.seq_length)
    log = StepLog(tokens=seen, flops=flops, tensorboard=args.tensorboard)
    dfa_hf.distribute_attention(model.to(device), group=group, config=TrainingConfig(checkpoint="remat"))
    ranks = mesh["dp", "cp"]._flatten("dp_cp")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=ranks, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
    rows = tokens.to(device).split(args.seq_length)[:-1]
    for step in range(args.steps):
        first = (step * data + mesh["dp"].get_local_rank()) * args.accumulate  # samples go by `dp` alone
        whole = [rows[(first + index) % len(rows)][None] for index in range(args.accumulate)]
        batches = [{"input_ids": ids, "labels": ids} for ids in whole]
        labels = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()
        dist.all_reduce(labels, group=mesh["dp"].get_group())
        total = torch.zeros((), device=device)
        for batch in batches:
            # The loss of a batch is its sum over the labels of all, times `dp`, over which FSDP averages too.
            # A Python number: mixed precision would round a tensor.
            batch["num_items_in_batch"] = int(labels) / data
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        log.step(total / data, grad_norm=norm)
    dist.destroy_process_group()


main()
