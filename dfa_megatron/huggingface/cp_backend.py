"""Let `ParallelismConfig(cp_size=N, cp_backend="dfa")` of accelerate say that ranks share sequences.

An accelerator that is made with it takes the ranks of a sequence for data-parallel ones, which it shards weights over;
ours then count as one process, as by `distribute_accelerator`. patches/accelerate has the same calls in accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dfa_megatron.config import TrainingConfig
from dfa_megatron.hooks import surround
from dfa_megatron.huggingface.accelerator import share_by_config
from dfa_megatron.huggingface.current_forward import NAME
from dfa_megatron.huggingface.trainer import distribute_trainer


def add_cp_backend() -> None:
    """Let accelerate take `ParallelismConfig(cp_size=N, cp_backend="dfa")`; before one is made, and again if you like.

    An `Accelerator` with it counts groups of N ranks, and its `prepare` distributes a transformers model; a Trainer of
    transformers or TRL is distributed when it first trains, evaluates or predicts. FSDP2 is not demanded; with it,
    `dp_shard_size` counts groups. `cp_handler` may be a `TrainingConfig`. docs/hooks.md lists what is replaced.
    """
    from accelerate import Accelerator, ParallelismConfig

    surround(ParallelismConfig, "__post_init__", _check_fields)
    surround(Accelerator, "__init__", _init)


def _check_fields(own: Callable[[Any], None], config: Any) -> None:
    """Check the fields of a ParallelismConfig as accelerate does, which knows the backend "torch" alone."""
    if (config.cp_backend or os.environ.get("PARALLELISM_CONFIG_CP_BACKEND")) != NAME:
        own(config)
        return
    handler, config.cp_handler, config.cp_backend = config.cp_handler, None, "torch"
    own(config)
    config.cp_backend, config.cp_handler = NAME, handler and TrainingConfig.of(handler)


def _init(own: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    """Make an accelerator; `parallelism_config` is the last of its parameters."""
    from accelerate import ParallelismConfig

    asked = kwargs.get("parallelism_config")
    if asked is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        asked = ParallelismConfig()
    if asked is None or asked.cp_backend != NAME or asked.cp_size == 1:
        own(accelerator, *args, **kwargs)
        return
    own(accelerator, *args, **{**kwargs, "parallelism_config": without_cp(asked, kwargs.get("fsdp_plugin"))})
    share(accelerator, asked)


def without_cp(config: Any, fsdp_plugin: Any) -> Any:
    """Return the ParallelismConfig of an accelerator to which all ranks are data parallel: shards, with FSDP."""
    sharded = fsdp_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    whole = config.data_parallel_size * config.cp_size if config.data_parallel_size > 1 else 1  # 1 stands for all ranks
    return type(config)(
        dp_replicate_size=config.dp_replicate_size if sharded else whole,
        dp_shard_size=config.dp_shard_size * config.cp_size if sharded else 1,
        tp_size=config.tp_size, sp_size=config.sp_size, cp_size=1, cp_backend="torch",
    )  # fmt: skip


def share(accelerator: Any, config: Any) -> None:
    """Let an accelerator that was just made count groups of `cp_size` ranks; a Trainer that makes it comes later."""
    from transformers import Trainer

    share_by_config(accelerator, config.cp_size, config.cp_handler)
    for name in ("train", "evaluate", "predict"):
        surround(Trainer, name, _distribute_first)


def _distribute_first(own: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Distribute a Trainer whose accelerator asks for it, if it is not yet, and go on."""
    accelerator = trainer.accelerator
    if getattr(accelerator, "_dfa_by_config", False) and accelerator._dfa_trained is None:
        distribute_trainer(trainer, config=accelerator._dfa_config)
    return own(trainer, *args, **kwargs)
