"""`initialize` in place of `deepspeed.initialize`: the same arguments and results, with the JSON's block honoured."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.attention import DistFlashAttention
from dfa_megatron.deepspeed.block import KEY, Block
from dfa_megatron.deepspeed.mesh import Mesh, make_mesh, remember
from dfa_megatron.deepspeed.refusals import check_batch_sizes, check_call, check_engine, check_settings
from dfa_megatron.deepspeed.sequence_groups import SequenceGroups, publish, unpublished
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import distribute_attention
from dfa_megatron.runtime.channel import group_name

logger = logging.getLogger(__name__)

_PORT = 29500
_IN_ARGS = ("deepspeed_config", "deepscale_config")
"""Where DeepSpeed looks for its configuration on `args`."""


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = _PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, and with `"dist_flash_attention": {"enabled": true, ...}` in the JSON, attention too.

    The model is a transformers causal language model, or any module whose attention is `DistFlashAttention`; those that
    were made without a group get the one of their sequence. Gradients are right at every ZeRO stage for a loss that is
    `dfa_megatron.deepspeed.loss`, or a transformers model's own on a batch of `shard_batch`: the mean of it over all
    ranks is the loss of the whole batch.

    Returns:
        DeepSpeed's engine, optimizer, training_dataloader and lr_scheduler; see also `mesh_of(engine)`.

    Raises:
        UnsupportedError: an unknown or ill-typed key in the block, or a request that contradicts it.
    """
    import deepspeed

    from dfa_megatron.deepspeed.install import deepspeeds_own

    rest: dict[str, Any] = {
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "lr_scheduler": lr_scheduler,
        "distributed_port": distributed_port,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
    }
    settings = _settings(args, config if config is not None else config_params)
    block = Block.from_mapping(settings[KEY]) if KEY in settings else None
    if block is None or not block.enabled:
        given = {"mpu": mpu, "mesh_param": mesh_param, "training_data": training_data}
        with unpublished():
            plain: tuple[Any, Any, Any, Any] = deepspeeds_own()(
                args=args, model=model, config=config, config_params=config_params, **given, **rest
            )
        return plain
    check_settings(settings, block.size)  # before the ranks meet
    check_call(model, mpu=mpu, mesh_param=mesh_param, training_data=training_data)
    deepspeed.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    settings, finish = before_initialize(model, settings, mpu)
    if args is not None:  # DeepSpeed takes one configuration, and ours is complete
        args = copy.copy(args)
        for name in _IN_ARGS:
            setattr(args, name, None)
    with unpublished():
        result: tuple[Any, Any, Any, Any] = deepspeeds_own()(args=args, model=model, config=settings, **rest)
    finish(result[0])
    return result


def before_initialize(
    model: torch.nn.Module, settings: dict[str, Any], mpu: Any = None
) -> tuple[dict[str, Any], Callable[[Any], None]]:
    """What has to happen before DeepSpeed makes its engine and after; `initialize` calls it, and so does the patch.

    Args:
        settings: DeepSpeed's configuration with the block in it; it is not changed.
        mpu: None, or the `SequenceGroups` that accelerate was given.

    Returns:
        The configuration for DeepSpeed, which takes no mpu then, and what to call with the engine.
    """
    block = Block.from_mapping(settings[KEY])
    groups = mpu if isinstance(mpu, SequenceGroups) else None
    size = block.size if groups is None else groups.mesh.size
    check_settings(settings, size)
    _check_checkpoint(model, block)
    mesh = make_mesh(size or settings.get("sequence_parallel_size")) if groups is None else groups.mesh
    check_batch_sizes(settings, mesh)
    _distribute(model, mesh, block, accelerate=groups is not None)

    def finish(engine: Any) -> None:
        check_engine(engine, dist.get_world_size())
        remember(engine, mesh)
        if groups is not None:
            publish(groups)

    return _for_deepspeed(settings, mesh), finish


def _settings(args: Any, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """DeepSpeed's configuration as a dictionary of our own, from wherever DeepSpeed would take it."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    sources = [given, *(getattr(args, name, None) for name in _IN_ARGS)]
    sources = [source for source in sources if source is not None]
    if len(sources) != 1:
        return {}  # none or several: DeepSpeed says what is wrong
    settings: dict[str, Any] = copy.deepcopy(load_ds_config(sources[0]))
    return settings


def _for_deepspeed(settings: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The settings that make DeepSpeed count batches by sequence and average gradients over all ranks.

    `sequence_parallel_size` without an mpu divides the number of ranks in its batch arithmetic and does nothing else.
    """
    settings = {key: value for key, value in settings.items() if key != KEY}
    settings["sequence_parallel_size"] = mesh.size
    if settings.get("bf16", settings.get("bfloat16", {})).get("enabled"):
        # Gradients of one sequence are summed over its ranks; in bfloat16 small shares would be lost.
        settings.setdefault("communication_data_type", "fp32")
    return settings


def _distribute(model: torch.nn.Module, mesh: Mesh, block: Block, *, accelerate: bool) -> None:
    """Give the model's attention the group of its sequence."""
    own = _own_attention(model)
    if not own:
        distribute_attention(
            model, group=mesh.group, options=block.options, checkpoint=block.checkpoint, accelerate=accelerate
        )
    for module in own:
        module.group_name = group_name(mesh.group)
        module.options = {**block.options.keywords(), **module.options}
    if dist.get_rank() == 0:
        logger.info("attention over sequences on %d ranks, %d sequences at a time", mesh.size, mesh.data_size)


def _own_attention(model: torch.nn.Module) -> list[DistFlashAttention]:
    """The attention modules of a model that is not a transformers model."""
    return [module for module in model.modules() if isinstance(module, DistFlashAttention)]


def _check_checkpoint(model: torch.nn.Module, block: Block) -> None:
    if block.checkpoint != "none" and _own_attention(model):
        raise UnsupportedError(
            f"{KEY}.checkpoint={block.checkpoint!r} for a model of your own",
            "its layers are not known",
            "checkpoint 'none', and dfa_megatron.remat.context_fn or remat_checkpoint in the model",
        )
