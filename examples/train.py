"""Train a Megatron-Core GPT on text with distributed attention, on the GPUs of this machine or on two CPU ranks.

    python examples/train.py --nproc-per-node 4 --seq-length 8192        # starts the ranks itself, as `make train` does
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/train.py

A folder of runs/ gets log.jsonl, loss.png and summary.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Megatron says on every rank that it falls back from Apex and Transformer Engine, which this example does without.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from dfa_megatron import MegatronConfig, draw
from dfa_megatron.doctor.start_ranks import ranks_here, start
from dfa_megatron.doctor.world import own_device
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.prepare import in_use
from step_log import StepLog, training_flops

LAST = 20
"""The final loss is the mean of so many steps, because each step sees another text."""


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags, named as Megatron's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc-per-node", type=int, help="ranks to start (default: one per GPU, 2 on CPU)")
    parser.add_argument("--data", type=Path, help="a text file, read byte by byte (default: Python's manual)")
    parser.add_argument("--train-iters", type=int, default=240)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--num-query-groups", type=int, help="key and value heads (default: as many as query heads)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, help="default: all ranks that tensor parallelism leaves")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--log-interval", type=int, default=10, help="steps per line")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    parser.add_argument("--save-report", type=Path, help="default: runs/ and the time of the start")
    MegatronConfig.add_arguments(parser)
    return parser.parse_args(argv)


def build(args: argparse.Namespace, context: int, device: torch.device) -> tuple[Any, Any, Any]:
    """Return the config, the model with its gradients' reduction, and the optimizer."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dfa_megatron.megatron import distribute_attention

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads, normalization="RMSNorm",
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.05,
        tensor_model_parallel_size=args.tensor_model_parallel_size, context_parallel_size=context,
        sequence_parallel=args.sequence_parallel, cp_comm_type="dfa", params_dtype=dtype, bf16=cuda,
        use_cpu_initialization=not cuda, calculate_per_token_loss=True,
        # Fused kernels that come with Apex or Transformer Engine.
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
    )  # fmt: skip
    # The one line that puts distributed attention into the model.
    spec = distribute_attention(
        get_gpt_layer_local_spec(normalization="RMSNorm"), config, config=MegatronConfig.from_args(args)
    )
    # A small base: a byte depends on the bytes just before it.
    given = {"position_embedding_type": "rope", "rotary_base": 500, "share_embeddings_and_output_weights": False}
    model = GPTModel(config, spec, 256, args.seq_length, **given).to(device)
    model = Float16Module(config, model) if cuda else model
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    adam = OptimizerConfig(
        optimizer="adam", lr=args.lr, adam_beta2=0.95, clip_grad=1.0, bf16=cuda, params_dtype=dtype
    )  # fmt: skip
    optimizer = get_megatron_optimizer(adam, [model])
    config.grad_scale_func = optimizer.scale_loss
    return config, model, optimizer


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield this rank's tokens: its data-parallel rank selects a sequence, `shard_batch` its part of that."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    text = args.data.read_bytes() if args.data else str(pydoc_data.topics.topics).encode()
    if len(text) <= args.seq_length:
        raise SystemExit(f"{args.data} has {len(text)} bytes, and --seq-length {args.seq_length} needs more")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    group, places = parallel_state.get_context_parallel_group(), torch.arange(args.seq_length)[None]
    dice = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        first = int(torch.randint(len(tokens) - args.seq_length, (), generator=dice))
        row = tokens[first : first + args.seq_length + 1][None]
        whole = {"tokens": row[:, :-1], "labels": row[:, 1:], "position_ids": places}
        cut = shard_batch(whole, group, MegatronConfig.from_args(args))
        yield {name: x if x is None else x.to(device) for name, x in cut.items()}


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """Return the losses, and what makes their sum and count: Megatron's forward_step_func."""
    batch = next(iterator)
    losses = model(**batch)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = losses.float().sum(), torch.tensor(losses.numel(), device=losses.device)
        return total, count, {"sum and count": torch.stack([total.detach(), count.float()])}

    return losses, loss_of


@record  # torchrun ends with the text of an error
def train(args: argparse.Namespace) -> None:
    """Train as one rank; the first one reports."""
    device = own_device()
    if device.type == "cpu":
        from dfa_megatron.megatron.stand_in import use_cpu

        use_cpu()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    tensor = args.tensor_model_parallel_size
    context = args.context_parallel_size or dist.get_world_size() // tensor
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    config, model, optimizer = build(args, context, device)
    data = parallel_state.get_data_parallel_world_size()
    parameters = tensor * sum(p.numel() for p in model.parameters())
    flops = training_flops(config, parameters, data * args.seq_length, args.seq_length)
    log = StepLog(
        tokens=data * args.seq_length, flops=flops, tensorboard=args.tensorboard, every=args.log_interval
    )  # fmt: skip
    steps, began, iterator = list[dict[str, float]](), time.perf_counter(), batches(args, device)
    COUNTERS.reset()
    for number in range(args.train_iters):
        # Ten steps of warmup, then down to a tenth.
        rate = args.lr * min(1.0, (number + 1) / 10) * (1 - 0.9 * number / args.train_iters)
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (report,) = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=1,
            seq_length=args.seq_length, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        total = report["sum and count"]
        dist.all_reduce(total)
        steps.append(log.step(total[0] / total[1], grad_norm=norm))
    if dist.get_rank() == 0:
        write(args, steps, time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()


def write(args: argparse.Namespace, steps: list[dict[str, float]], seconds: float) -> None:
    """Write log.jsonl, loss.png and summary.txt, and print the summary."""
    folder = args.save_report
    folder.mkdir(parents=True, exist_ok=True)
    losses = [step["loss"] for step in steps]
    later = steps[1:] or steps
    speed = sum(step["tokens_per_s"] for step in later) / len(later)
    plan, asked = in_use()[-1].plan, args.num_layers * len(steps)
    text = (
        f"loss {losses[0]:.3f} -> {sum(losses[-LAST:]) / len(losses[-LAST:]):.3f} (mean of the last "
        f"{min(LAST, len(losses))} of {len(losses)} steps) in {seconds:.0f} s, {speed:,.0f} tokens/s\n\n"
        f"{draw(plan, phase='forward')}\n\n"
        f"attention ran {COUNTERS.attention_forwards} times for {asked} layers x micro-batches of rank 0: "
        f"{COUNTERS.attention_forwards / asked:.2f} each\n"
    )
    (folder / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    (folder / "summary.txt").write_text(text, encoding="utf-8")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, alpha=0.3)
    axes.plot([sum(part := losses[max(0, n - 5) : n + 6]) / len(part) for n in range(len(losses))], color="C0")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    figure.savefig(folder / "loss.png", dpi=120)
    print(f"{text}\n{folder}: loss.png, log.jsonl, summary.txt", flush=True)


if __name__ == "__main__":
    args = parse(sys.argv[1:])
    args.save_report = args.save_report or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    if "RANK" in os.environ:
        train(args)
    else:
        command = [__file__, *sys.argv[1:], "--save-report", str(args.save_report)]
        sys.exit(start(command, ranks_here(args.nproc_per_node)))
