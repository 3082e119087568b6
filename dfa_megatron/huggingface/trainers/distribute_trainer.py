"""Let HF Trainer, or a subclass such as TRL's SFTTrainer, train with sequences that ranks share, without DeepSpeed.

accelerate's loader gives the ranks of a group the same batches, as it does for context parallelism. accelerate's own
context parallelism (`ParallelismConfig(cp_size=...)`) is not used: it demands FSDP and SDPA, and has no packs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface.distribute import distribute_attention, transformers_model
from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.huggingface.refusals import TRAINER
from dfa_megatron.huggingface.trainers.shared_batches import Shared, take_whole_batches


def distribute_trainer(trainer: Any, *, size: int | None = None, config: DistAttentionConfig | None = None) -> None:
    """Share each sequence of a Trainer among consecutive ranks, in training and evaluation; a collective call.

    Losses, gradients, gradient accumulation and evaluation are those of one process for each group of ranks, with
    uneven labels and packed documents too. Call it after the Trainer is made, and before `train` or `evaluate`.

    Args:
        trainer: a `transformers.Trainer`, with DDP or FSDP2. Its data set and collator make whole sequences.
        size: the ranks that share a sequence; None is all of them.
        config: schedule, kernel, checkpoint and the like.

    Raises:
        UnsupportedError: the Trainer or its model needs something unsupported; the message names it.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = world if size is None else size
    options = config or DistAttentionConfig()
    _check(trainer, options, world, size)
    if world == 1:
        distribute_attention(trainer.model, config=options)
        return
    shape = (world // size, size)
    mesh = init_device_mesh(trainer.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
    distribute_attention(trainer.model, group=mesh["cp"].get_group(), config=options)
    shared = take_whole_batches(transformers_model(trainer.model))
    trainer.get_cp_size = lambda: size
    flops = trainer.floating_point_ops
    trainer.floating_point_ops = lambda inputs: flops(inputs) / size
    if hasattr(trainer, "_tp_size"):  # by which TRL divides the tokens that all ranks count
        trainer._tp_size = size
    trainer._get_num_items_in_batch = functools.partial(_count, trainer, size)
    trainer.prediction_step = functools.partial(_predict, shared, options, trainer.prediction_step)
    accelerator = trainer.accelerator
    accelerator._prepare_device_mesh = lambda: mesh  # its loaders ask for it
    accelerator.gather_for_metrics = functools.partial(_gather, accelerator, trainer.model, size)
    trainer.gather_function = accelerator.gather_for_metrics


def _check(trainer: Any, options: DistAttentionConfig, world: int, size: int) -> None:
    parallel = trainer.accelerator.parallelism_config
    others = [name for name in ("cp_size", "sp_size", "tp_size") if getattr(parallel, name, 1) > 1]
    TRAINER.check(
        options,
        uneven_size=str(size) if size < 1 or world % size else None,
        ranks=world,
        other_parallelism=f"{others[0]}={getattr(parallel, others[0])}" if others else None,
        deepspeed=trainer.is_deepspeed_enabled,
        new_models=trainer.model_init is not None,
        own_loss=trainer.label_smoother is not None or trainer.compute_loss_func is not None,
        metrics=trainer.compute_metrics is not None,
        objects=trainer.args.eval_use_gather_object,
        tokens_seen=trainer.args.include_num_input_tokens_seen not in (False, "no"),
        checkpointed=trainer.args.gradient_checkpointing,
    )


def _count(trainer: Any, size: int, batches: Sequence[Any], device: torch.device) -> torch.Tensor | None:
    """Count the labels of a step, of all its micro-batches, as Trainer does; each batch is on `size` ranks."""
    if not batches or "labels" not in batches[0] or not trainer.model_accepts_loss_kwargs:
        return None
    count = torch.stack([(batch["labels"][..., 1:] != IGNORED).sum() for batch in batches]).sum().to(device)
    if trainer.args.average_tokens_across_devices:
        count = trainer.accelerator.gather(count).sum()
    return count.clamp(min=1) / size


def _predict(
    shared: Shared,
    options: DistAttentionConfig,
    own: Callable[..., Any],
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
) -> Any:
    """Run the Trainer's own step, with the logits of all tokens only where they are wanted."""
    TRAINER.check(options, metrics=not prediction_loss_only)
    shared.logits = not prediction_loss_only
    try:
        return own(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
    finally:
        shared.logits = True


def _gather(accelerator: Any, model: torch.nn.Module, size: int, values: Any, use_gather_object: bool = False) -> Any:
    """Gather for metrics: in training from all ranks, in evaluation from one rank of each group.

    What accelerate's loader repeated to fill the last batch is left out, as in its own function.
    """
    TRAINER.check(objects=use_gather_object)
    whole = accelerator.gather(values)
    if model.training:
        return whole
    state = accelerator.gradient_state
    rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def once(value: torch.Tensor) -> torch.Tensor:
        groups = value.unflatten(0, (-1, size, value.shape[0] // accelerator.num_processes))
        first: torch.Tensor = groups[:, 0].flatten(0, 1)
        return first[:rows]

    return tree_map_only(torch.Tensor, once, whole)
