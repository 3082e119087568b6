"""Train a transformers model with PyTorch alone: FSDP2 over a mesh (dp x cp), attention over its cp ranks.

    torchrun --nproc-per-node 4 examples/fsdp2.py --context-parallel-size 2 --save state.pt      # a toy, on CPU ranks

A second run with the same `--save` goes on behind the last step, in the middle of the text.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dfa_megatron import StepLog, TrainingConfig, training_flops
from dfa_megatron import huggingface as dfa_hf

Batch = Mapping[str, torch.Tensor]


def prepare(model: Any, mesh: DeviceMesh, config: TrainingConfig | None = None) -> Any:
    """Distribute attention over `cp`, and shard parameters over all ranks of the mesh (dp, cp)."""
    dfa_hf.distribute_attention(model, group=mesh["cp"].get_group(), config=config)
    ranks = mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks)
    return fully_shard(model, mesh=ranks)


def parts(batches: Sequence[Batch], mesh: DeviceMesh) -> list[dict[str, torch.Tensor]]:
    """Cut the batches of one step, and give them the labelled tokens of all: their losses then add up to the mean.

    Args:
        batches: whole sequences, as `shard_batch` takes them; the same on the ranks of `cp`, others elsewhere on `dp`.
        mesh: of dimensions (dp, cp). FSDP averages gradients over its ranks, so the count is divided by their number.
    """
    local = [dfa_hf.shard_batch(batch, group=mesh["cp"].get_group()) for batch in batches]
    count = torch.stack([(batch["shift_labels"] != -100).sum() for batch in local]).sum()
    dist.all_reduce(count)
    for batch in local:
        batch["num_items_in_batch"] = count.clamp(min=1) / dist.get_world_size()
    return local


def gradients(model: Any, batches: Sequence[Batch], mesh: DeviceMesh) -> torch.Tensor:
    """Accumulate the gradients of a step over its micro-batches; return its loss, the same on every rank."""
    total = torch.zeros((), device=mesh.device_type)
    for batch in parts(batches, mesh):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[Batch], mesh: DeviceMesh) -> torch.Tensor:
    """Return the mean loss of all labelled tokens; lengths and batch sizes may be others than in training."""
    training = model.training
    model.eval()
    losses = [model(**batch, use_cache=False).loss for batch in parts(batches, mesh)]
    model.train(training)
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write parameters, optimizer and step from the first rank, whole."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters, moments = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        partial = path.with_suffix(".partial")
        torch.save({"model": parameters, "optimizer": moments, "step": step}, partial)
        partial.replace(path)
    dist.barrier()


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Read what `save` wrote; return the number of steps done, from which the next samples follow."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    return int(state["step"])


def main() -> None:
    """Train, and print a line a step on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="of the hub, or a folder; a tiny Llama if left out")
    parser.add_argument("--data", type=Path, help="a text file; Python's own manual if left out")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--context-parallel-size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--save", type=Path, help="the file that holds the state")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    shape = (dist.get_world_size() // args.context_parallel_size, args.context_parallel_size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
    text = args.data.read_text(encoding="utf-8") if args.data else str(pydoc_data.topics.topics)
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
    rows = tokens.split(args.seq_length)[:-1]
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    seen = mesh["dp"].size() * args.accumulate * args.seq_length
    flops = training_flops(model.config, parameters, seen, args.seq_length)
    log = StepLog(tokens=seen, flops=flops, tensorboard=args.tensorboard)
    prepare(model.to(device), mesh, TrainingConfig(checkpoint="remat"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
    done = load(args.save, model, optimizer) if args.save and args.save.exists() else 0
    for step in range(done, args.steps):
        first = (step * mesh["dp"].size() + mesh["dp"].get_local_rank()) * args.accumulate
        chosen = [rows[(first + index) % len(rows)][None].to(device) for index in range(args.accumulate)]
        loss = gradients(model, [{"input_ids": ids, "labels": ids} for ids in chosen], mesh)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    if args.save:
        save(args.save, model, optimizer, max(done, args.steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
