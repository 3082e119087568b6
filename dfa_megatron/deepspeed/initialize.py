"""`initialize` in place of `deepspeed.initialize`: the same arguments and results, with the JSON's block honoured."""

from __future__ import annotations

import copy
from typing import Any

from dfa_megatron.deepspeed.engine import Finish, checked_block, prepare
from dfa_megatron.deepspeed.install import deepspeeds_own
from dfa_megatron.deepspeed.json_block import KEY
from dfa_megatron.runtime.environment import warn_of_untested

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
    """Run `deepspeed.initialize`; with `"dist_flash_attention": {"enabled": true, ...}` distribute attention too.

    The model is a transformers causal language model, or any module or pipeline whose attention is
    `DistFlashAttention`; those that were made without a group get the one of their sequence. Gradients are right at
    every ZeRO stage for `dfa_megatron.deepspeed.loss`, or a transformers model's own loss. A transformers model takes
    whole batches, the same on every rank of a group: see `dfa_megatron.huggingface.distribute_attention`.

    Returns:
        DeepSpeed's engine, optimizer, training_dataloader and lr_scheduler; see also `mesh_of(engine)`.

    Raises:
        UnsupportedError: an unknown or ill-typed key in the block, or a request that contradicts it.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    settings = _settings(args, config if config is not None else config_params)
    warn_of_untested()
    if KEY in settings and get_accelerator().device_name() == "cpu":
        # Or `init_distributed` compiles an operator for inference, which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    block = checked_block(model, settings, mpu=mpu, mesh_param=mesh_param, training_data=training_data)
    finish: Finish | None = None
    if block is not None:
        deepspeed.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        config, finish = prepare(model, settings, block)
        config_params = mpu = None
        if args is not None:  # DeepSpeed takes one configuration, and ours is complete
            args = copy.copy(args)
            for name in _IN_ARGS:
                setattr(args, name, None)
    result = deepspeeds_own()(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
    )
    if finish is not None:
        finish(result[0])
    return result


def _settings(args: Any, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration, from the place where DeepSpeed would find it."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    sources = [given, *(getattr(args, name, None) for name in _IN_ARGS)]
    sources = [source for source in sources if source is not None]
    if len(sources) != 1:
        return {}  # none or several: DeepSpeed says what is wrong
    settings: dict[str, Any] = copy.deepcopy(load_ds_config(sources[0]))
    return settings
