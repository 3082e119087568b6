"""Prepare model and configuration before DeepSpeed makes its engine, and check the engine after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.attention import DistFlashAttention
from dfa_megatron.deepspeed import pipeline
from dfa_megatron.deepspeed.checkpointing import deepspeeds_function
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.proved_engine import prove
from dfa_megatron.deepspeed.tested_keys import NO_MESH, UNTESTED, check_filled_in, check_settings
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checkpointing import set_checkpointing
from dfa_megatron.huggingface.distribute import distribute_attention, transformers_model
from dfa_megatron.huggingface.mesh import Mesh, make_mesh
from dfa_megatron.runtime.comm.groups import group_name, resolve

logger = logging.getLogger(__name__)

OLDEST = (0, 19, 6)
"""The oldest version of DeepSpeed that was compared with one process and found right."""

_MESH = "_dfa_mesh"
"""The attribute of an engine that holds its mesh."""

OTHER_SAMPLES = "DeepSpeed's loader would give the ranks of one sequence different samples"

Finish = Callable[[Any], None]
"""A function to call with the engine."""


def before_initialize(
    model: torch.nn.Module, config: dict[str, Any], mpu: Any = None, mesh_param: Any = None, training_data: Any = None
) -> tuple[dict[str, Any], Any, Finish]:
    """Prepare a patched `deepspeed.initialize` from its arguments, for a configuration with the block.

    Args:
        config: DeepSpeed's configuration; it is not changed.

    Returns:
        The configuration and the mpu for DeepSpeed, and the function to call with the engine.

    Raises:
        UnsupportedError: as `initialize` does.
    """
    block = checked_block(model, config, mpu=mpu, mesh_param=mesh_param, training_data=training_data)
    if block is None:
        return config, mpu, lambda engine: None
    config, finish = prepare(model, config, block)
    return config, None, finish


def checked_block(
    model: Any, settings: dict[str, Any], *, mpu: Any, mesh_param: Any, training_data: Any
) -> DeepSpeedOptions | None:
    """Return the enabled block of a configuration, or None, and refuse what contradicts it.

    Raises:
        UnsupportedError: names the key or the argument of `initialize`.
    """
    block = DeepSpeedOptions.enabled_in(settings)
    if block is not None:
        check_settings(settings, block.size)
        check_filled_in(settings)
        check_call(model, mpu=mpu, mesh_param=mesh_param, training_data=training_data)
    return block


def prepare(model: torch.nn.Module, settings: dict[str, Any], block: DeepSpeedOptions) -> tuple[dict[str, Any], Finish]:
    """Distribute the model's attention, after `checked_block`.

    Args:
        settings: DeepSpeed's configuration with the block in it; it is not changed.
        block: that block, which is enabled.

    Returns:
        The configuration for DeepSpeed, to be used without an mpu, and the function to call with the engine.
    """
    from deepspeed.pipe import PipelineModule

    size = block.size or settings.get("sequence_parallel_size")
    if isinstance(model, PipelineModule):
        return _pipelined(model, settings, block, size)
    own_attention = _own_attention(model)
    if own_attention and block.options.checkpoints_layers:
        raise UnsupportedError(
            f"dist_flash_attention.checkpoint={block.options.checkpoint!r} for a model of your own",
            "its layers are not known",
            "checkpoint 'auto', and dfa_megatron.deepspeed.checkpoint or dfa_megatron.remat.context_fn in the model",
        )
    mesh = make_mesh(size)
    _check_batch_sizes(settings, mesh)
    if own_attention:
        check_known(block, "a model of your own")
    _set_group(own_attention, mesh, block)
    if not own_attention:
        _distribute(model, settings, mesh, block)

    def finish(engine: Any) -> None:
        _accept(engine, mesh, settings)
        engine.dp_world_size = mesh.data_size  # by which its `set_train_batch_size` counts, and its profiler
        if block.prove:
            prove(engine)

    return {**_common(settings), "sequence_parallel_size": mesh.size}, finish


def check_known(block: DeepSpeedOptions, model: str) -> None:
    """Refuse options that need the parts of a transformers model, for another one.

    Raises:
        UnsupportedError: names the option.
    """
    if block.options.loss_tile != "off":
        raise UnsupportedError(
            f"dist_flash_attention.loss_tile={block.options.loss_tile} for a model of your own or a pipeline",
            "its head is not known",
            "'off', and dfa_megatron.deepspeed.tiled_loss in the model",
        )
    if block.prove:
        raise UnsupportedError(
            f"dist_flash_attention.prove for {model}",
            "the reference is a transformers model with its former attention",
            "a transformers causal language model, or no prove",
        )


def _pipelined(
    module: torch.nn.Module, settings: dict[str, Any], block: DeepSpeedOptions, size: int | None
) -> tuple[dict[str, Any], Finish]:
    check_known(block, "a pipeline")
    pipeline.check_clipping(module, settings)
    mesh = pipeline.pipeline_mesh(module, size)
    _set_group(_own_attention(module), mesh, block)  # a stage may have none

    def finish(engine: Any) -> None:
        _accept(engine, mesh, settings)
        if block.options.checkpoints_layers:
            pipeline.set_checkpointing(engine, block.options)

    return pipeline.settings_for(_common(settings), module, block), finish


def _common(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without the block, which sums gradients over the ranks of a sequence in a sufficient dtype.

    Without an mpu, `sequence_parallel_size` only divides the number of ranks in DeepSpeed's batch arithmetic. Gradients
    are averaged over all ranks at every ZeRO stage.
    """
    settings = {key: value for key, value in settings.items() if key != KEY}
    half = settings.get("bf16", settings.get("bfloat16"))
    if isinstance(half, dict) and half.get("enabled"):  # DeepSpeed refuses anything else
        settings.setdefault("communication_data_type", "fp32")  # in bfloat16 small shares would be lost
    return settings


def mesh_of(engine: Any) -> Mesh:
    """Return the mesh of an engine that `initialize` made with the block enabled.

    Raises:
        UnsupportedError: the engine was made without the block.
    """
    mesh: Mesh | None = getattr(engine, _MESH, None)
    if mesh is None:
        raise UnsupportedError(
            "mesh_of an engine without distributed attention",
            "the block dist_flash_attention was missing or not enabled",
            "dfa_megatron.deepspeed.initialize with the block",
        )
    return mesh


def _accept(engine: Any, mesh: Mesh, settings: Mapping[str, Any]) -> None:
    """Check the engine, store its mesh on it, and refuse its methods that distributed attention does not support."""
    _check_engine(engine, mesh.size * mesh.data_size)
    engine.compile, engine.deepspeed_io = _compile, _deepspeed_io
    setattr(engine, _MESH, mesh)
    if dist.get_rank() == 0:
        micro, accumulated = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        derived = accumulated > 1 and "gradient_accumulation_steps" not in settings  # DeepSpeed does not say so
        logger.log(
            logging.WARNING if derived else logging.INFO,
            "attention over sequences on %d ranks; a step takes %d sequences: %d on each of %d groups of ranks, "
            "%d times (gradient_accumulation_steps%s)",
            *(mesh.size, micro * accumulated * mesh.data_size, micro, mesh.data_size, accumulated),
            ", from train_batch_size" if derived else "",
        )


def _compile(*_args: Any, **_kwargs: Any) -> None:
    raise UnsupportedError(
        "engine.compile with distributed attention",
        "transformers then asks for masks that are not planned, and no test compares ZeRO's gathers in it",
        "the engine without compile",
    )


def _deepspeed_io(*_args: Any, **_kwargs: Any) -> None:
    """Stand for a method that DeepSpeed itself calls only for `training_data`."""
    raise UnsupportedError(
        "engine.deepspeed_io with distributed attention",
        OTHER_SAMPLES,
        "a DataLoader of your own whose sampler takes data_rank and data_size of mesh_of(engine)",
    )


def _set_group(attention: list[DistFlashAttention], mesh: Mesh, block: DeepSpeedOptions) -> None:
    """Give attention modules the group of their sequence and the block's options; their own settings stay.

    Raises:
        UnsupportedError: a module was made with a group of other ranks.
    """
    wanted = dist.get_process_group_ranks(mesh.group)
    for module in attention:
        if module.group_name:
            found = dist.get_process_group_ranks(resolve(module.group_name))
            if found != wanted:
                raise UnsupportedError(
                    f"a DistFlashAttention over ranks {found}",
                    f"the sequences of this engine are on ranks {wanted}",
                    "DistFlashAttention without a group, or the block's size for its group",
                )
        elif module.group_name is None:
            module.group_name = group_name(mesh.group)
        if module.config is None:
            module.config = block.options


def _distribute(model: torch.nn.Module, settings: dict[str, Any], mesh: Mesh, block: DeepSpeedOptions) -> None:
    function = deepspeeds_function(settings, block.options)
    reentrant = block.reentrant or function is not None
    distribute_attention(model, group=mesh.group, config=block.options, reentrant=reentrant, unlisted=block.unlisted)
    if function is not None:
        offload = block.options.remat_offload
        set_checkpointing(transformers_model(model), block.options.checkpoint, offload=offload, function=function)


def _own_attention(model: torch.nn.Module) -> list[DistFlashAttention]:
    """Return the attention modules of a model that is not a transformers model."""
    return [module for module in model.modules() if isinstance(module, DistFlashAttention)]


def check_call(model: Any, *, mpu: Any, mesh_param: Any, training_data: Any) -> None:
    """Refuse arguments of `initialize` that contradict the block.

    Raises:
        UnsupportedError: names the argument.
    """
    import deepspeed
    from deepspeed.moe.layer import MoE

    if (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) < OLDEST:
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__}",
            "up to 0.19.4 it accumulates the gradients of micro-batches wrong at ZeRO 0 and 1 in float32, on one "
            "process already",
            "DeepSpeed 0.19.6 or later",
        )
    if mpu is not None:
        raise UnsupportedError(
            "mpu with dist_flash_attention",
            "with an mpu that knows of sequences DeepSpeed scales gradients by ZeRO stage: summed at 0, 1 and 2, "
            "averaged at 3",
            "no mpu (nor UlyssesSPAttentionHF.register_with_transformers, or ParallelismConfig(sp_size), which make "
            "one); the groups are made from dist_flash_attention.size",
        )
    if mesh_param is not None:
        raise UnsupportedError("mesh_param with dist_flash_attention", NO_MESH, "no mesh_param")
    if training_data is not None:
        raise UnsupportedError(
            "training_data with dist_flash_attention",
            OTHER_SAMPLES,
            "a loader of your own for rank mesh_of(engine).data_rank of .data_size",
        )
    if any(isinstance(module, MoE) for module in model.modules()):
        raise UnsupportedError("DeepSpeed's MoE layers", UNTESTED, "a model without them")


def _check_batch_sizes(settings: dict[str, Any], mesh: Mesh) -> None:
    """Refuse batch sizes that count each rank of a sequence as a sequence; DeepSpeed's own error does not explain."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    counts = [settings.get(name) for name in names]
    if mesh.size == 1 or not all(isinstance(count, int) for count in counts):
        return
    whole, micro, accumulated = (int(count or 0) for count in counts)
    size, ranks = mesh.size, mesh.size * mesh.data_size
    if whole == micro * accumulated * ranks:
        raise UnsupportedError(
            f"train_batch_size={whole} for {mesh.data_size} sequences at a time",
            f"it counts all {ranks} ranks, but {size} of them share a sequence",
            f"train_batch_size {whole // size}; HF Trainer and accelerate count groups after distribute_trainer or "
            "distribute_accelerator",
        )


def _check_engine(engine: Any, ranks: int) -> None:
    """Check that this version of DeepSpeed averages gradients over all ranks, which the loss is scaled for."""
    theirs, group = engine.sequence_parallel_size, engine.seq_data_parallel_group
    reduced = ranks if group is None else group.size()
    if theirs != 1 or reduced != ranks:
        raise UnsupportedError(
            f"an engine that reduces gradients over {reduced} of {ranks} ranks, sequence parallelism of {theirs}",
            "groups for sequence parallelism were made in this process before, or this version of DeepSpeed differs",
            "one framework for sequence parallelism in a process; DeepSpeed 0.19.6 to 0.19.8",
        )
