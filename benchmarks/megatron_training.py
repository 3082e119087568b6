"""Training steps of a Llama-shaped GPTModel with Megatron's DDP and distributed optimizer, on random tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.megatron_common import Mode, Shape, make_config, make_spec, peak_gib
from dfa_megatron.doctor.world import mark, seconds_between, slowest


def train(
    job: Any, shape: Shape, mode: Mode, length: int, layers: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """Return tokens and model TFLOP per second and GPU, peak memory and the loss, of `steps` steps after two."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    options = mode.options(job.kernel, job.schedule)
    config = make_config(shape, layers, mode, fusion=job.fusion)
    model, optimizer = build(config, make_spec(config, mode, options), job.vocab_size, length)
    peak_gib(reset=True)
    times, losses = [], []
    for step in range(2 + steps):
        before = mark(device)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(job.vocab_size, length, step, options, device),
            model=model,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        times.append(1e3 * seconds_between(before, mark(device)))
        losses.append(reduced[0]["loss"])
    elapsed = slowest([statistics.median(times[2:])])[0]
    embedding = shape.hidden_size * job.vocab_size
    useful = 3 * (layers * shape.layer_flop(length) + 2.0 * embedding * length)
    ranks = dist.get_world_size()
    return {
        "parameters": layers * shape.layer_parameters + 2 * embedding,
        "steps": steps,
        "ms_per_step": round(elapsed, 2),
        "tokens_per_second_per_gpu": round(length / elapsed * 1e3 / ranks, 1),
        "tflops_per_gpu": round(useful / elapsed / 1e9 / ranks, 1),
        "peak_gib": round(peak_gib(), 2),
        "first_loss": mean_loss(losses[0]),
        "last_loss": mean_loss(losses[-1]),
    }


def build(config: Any, spec: Any, vocabulary: int, length: int, *, lr: float = 1e-4) -> tuple[Any, Any]:
    """Return the model in DDP, and Adam, whose state is spread over the ranks that share a sequence."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    cuda = torch.cuda.is_available()
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=length,
        position_embedding_type="rope",
        rotary_base=500000,
        share_embeddings_and_output_weights=False,
    )
    if cuda:
        model = Float16Module(config, model.cuda())
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
    )
    model = DistributedDataParallel(config, reduction, model)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr,
            weight_decay=0.01,
            clip_grad=1.0 if cuda else 0.0,
            bf16=cuda,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    model.train()
    return model, optimizer


def batches(vocabulary: int, length: int, step: int, options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield this rank's tokens of a sequence that all draw alike; it has a pattern, so that the loss can fall."""
    from megatron.core import parallel_state

    from dfa_megatron import MegatronConfig
    from dfa_megatron.megatron import shard_batch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(min(vocabulary, 512), (1, length + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]  # every second token repeats the one before it
    whole = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(length)[None],
    }
    zigzag = MegatronConfig(data_layout="zigzag")  # Megatron's own batches, for its own attention
    sharded = shard_batch(whole, parallel_state.get_context_parallel_group(), options or zigzag)
    yield {name: part if part is None else part.contiguous().to(device) for name, part in sharded.items()}


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """Return the model's output, and a function that makes the loss of it."""
    batch = next(iterator)
    output = model(**batch)

    def loss(output: torch.Tensor, **_: Any) -> Any:
        total = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def mean_loss(loss: torch.Tensor) -> float:
    """Return the mean over all ranks."""
    shared = loss.detach().double().cpu()
    dist.all_reduce(shared)
    return round((shared[0] / shared[1]).item(), 4)
