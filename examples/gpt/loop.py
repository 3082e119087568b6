"""One rank's training: Megatron's own pipeline schedule over batches that are sliced to this rank's tokens."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron import MegatronConfig
from dfa_megatron.doctor.world import own_device
from dfa_megatron.runtime.counters import COUNTERS
from gpt.errors import UserError
from gpt.flags import Sizes
from gpt.saved import Saved, facts_of
from gpt.text import Tokens, sample

Step = dict[str, float]
"""The figures of a step: step, loss, grad_norm, lr, tokens_per_second, seconds since the start."""


def join(sizes: Sizes) -> torch.device:
    """Join the process group: NCCL with one GPU per rank, or gloo on CPU."""
    device = own_device()
    if device.type == "cpu":
        from dfa_megatron.megatron.cpu.stand_in import use_cpu

        use_cpu()
    from megatron.core import parallel_state

    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    parallel_state.initialize_model_parallel(sizes.tensor, sizes.pipeline, context_parallel_size=sizes.context)
    return device


def train(
    args: argparse.Namespace,
    sizes: Sizes,
    options: MegatronConfig,
    tokens: Tokens,
    device: torch.device,
    found: Saved | None,
    tell: Callable[[Step], None],
) -> None:
    """Train up to `--train-iters` or `--exit-interval` and tell about each step; every rank calls this.

    Raises:
        UserError: the loss is no longer a number; a checkpoint cannot be read or written.
    """
    from gpt.checkpoint import load, save
    from gpt.model import build

    trainer = build(args, sizes, options, tokens.vocabulary)
    done = found.step if found else 0
    if found:
        load(trainer, found)
    facts = facts_of(args, sizes, tokens)
    batches = _batches(args, sizes, options, tokens, device, first=done * sizes.micro_batches)
    COUNTERS.reset()
    start = before = time.perf_counter()
    for step in range(done + 1, args.train_iters + 1):
        loss, grad_norm, rate = _step(trainer, batches, args, sizes, device)
        now = time.perf_counter()
        if not math.isfinite(loss):
            raise UserError(f"the loss of step {step} is {loss}: lower --lr {args.lr:g} or raise --lr-warmup-iters")
        per_step = args.micro_batch_size * sizes.micro_batches * sizes.data * args.seq_length
        tell(
            {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": rate,
                "tokens_per_second": per_step / (now - before),
                "seconds": now - start,
            }
        )
        last = step == args.train_iters or _due(step, args.exit_interval)
        if args.save and (last or _due(step, args.save_interval)):
            save(trainer, args.save, step, facts)
        if last:
            return
        before = time.perf_counter()


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def _step(
    trainer: Any, batches: Iterator[dict[str, Any]], args: argparse.Namespace, sizes: Sizes, device: torch.device
) -> tuple[float, float, float]:
    """Run forward, backward and the optimizer.

    Returns:
        The mean loss, the norm of the gradient and the learning rate of this step.
    """
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=trainer.model,
        num_microbatches=sizes.micro_batches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    rate = trainer.optimizer.param_groups[0]["lr"]
    _, grad_norm, _ = trainer.optimizer.step()
    trainer.scheduler.step(1)
    return _mean_loss(losses, device), float(grad_norm), float(rate)


def _batches(
    args: argparse.Namespace,
    sizes: Sizes,
    options: MegatronConfig,
    tokens: Tokens,
    device: torch.device,
    *,
    first: int,
) -> Iterator[dict[str, Any]]:
    """Yield this rank's micro-batches from number `first` on.

    The data-parallel rank selects sequences, the context-parallel rank selects tokens.
    """
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    group = parallel_state.get_context_parallel_group()
    size, mine = args.micro_batch_size, parallel_state.get_data_parallel_rank()
    for micro_batch in itertools.count(first):
        index = (micro_batch * sizes.data + mine) * size
        whole = sample(tokens, args.seq_length, seed=args.seed, indices=range(index, index + size))
        sharded = shard_batch(whole, group, options)
        yield {name: None if value is None else value.to(device) for name, value in sharded.items()}


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Return the output of this pipeline stage and the loss as a function of it: Megatron's forward_step_func."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"].flatten()
        total, count = (losses.float().flatten() * mask).sum(), mask.sum().int()
        return total, count, {"sum and count": torch.stack([total.detach(), count.float()])}

    return output, loss_of


def _mean_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Return the mean loss of all tokens of the step, on every rank; only the last stage has losses to add."""
    total = torch.zeros(2, device=device)
    for loss in losses or []:
        total += loss["sum and count"]
    dist.all_reduce(total)
    return float(total[0] / total[1])


def gather_counters(device: torch.device) -> list[dict[str, int]]:
    """Gather every rank's counters, in the order of ranks; every rank calls this."""
    mine = COUNTERS.snapshot()
    row = torch.tensor(list(mine.values()), dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [dict(zip(mine, (int(value) for value in other.tolist()), strict=True)) for other in rows]
