"""Let `ParallelismConfig(cp_size=N, cp_backend="dfa")` of accelerate say that ranks share sequences.

An accelerator that is made with it takes the ranks of a sequence for data-parallel ones, which it shards weights over;
ours then count as one process, as by `distribute_accelerator`. patches/accelerate has the same calls in accelerate.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import replace
from dfa_megatron.huggingface.accelerator import share_by_config
from dfa_megatron.huggingface.current_forward import NAME
from dfa_megatron.huggingface.trainer import distribute_trainer

_OURS = "_dfa_ours"
"""The attribute of a method of ours that stands in for another's."""


def add_cp_backend() -> None:
    """Let accelerate take `ParallelismConfig(cp_size=N, cp_backend="dfa")`; call it before one is made, and again.

    An `Accelerator` with it counts groups of N ranks, and its `prepare` distributes a transformers model; a Trainer of
    transformers or TRL is distributed when it first trains, evaluates or predicts. FSDP2 is not demanded.
    `cp_handler` may be a `TrainingConfig`. docs/hooks.md lists what is replaced, `dfa_megatron.hooks.restore()` undoes
    it.
    """
    from accelerate import Accelerator, ParallelismConfig

    _replace(ParallelismConfig, "__post_init__", _check_fields)
    _replace(Accelerator, "__init__", _init)


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Let a method of ours stand in for another, which it is given; a second call does nothing."""
    own = getattr(owner, name)
    if hasattr(own, _OURS):
        return

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(own, self, *args, **kwargs)

    setattr(method, _OURS, True)
    replace(owner, name, method)


def _check_fields(own: Callable[[Any], None], config: Any) -> None:
    """Check the fields of a ParallelismConfig as accelerate does, which knows the backend "torch" alone."""
    if (config.cp_backend or os.environ.get("PARALLELISM_CONFIG_CP_BACKEND")) != NAME:
        own(config)
        return
    handler, config.cp_handler, config.cp_backend = config.cp_handler, None, "torch"
    own(config)
    config.cp_backend, config.cp_handler = NAME, handler_of(handler)


def handler_of(handler: Any) -> TrainingConfig | None:
    """Return the `cp_handler` of the backend, if it is one."""
    return None if handler is None else TrainingConfig.of(handler)


def _init(own: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    """Make an accelerator; `parallelism_config` is the last of its parameters."""
    from accelerate import ParallelismConfig

    asked = kwargs.get("parallelism_config")
    if asked is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        asked = ParallelismConfig()
    if asked is None or not asks(asked):
        own(accelerator, *args, **kwargs)
        return
    own(accelerator, *args, **{**kwargs, "parallelism_config": without_cp(asked, kwargs.get("fsdp_plugin"))})
    share(accelerator, asked)


def asks(config: Any) -> bool:
    """Return whether a ParallelismConfig asks for this backend."""
    return config.cp_backend == NAME and config.cp_size > 1


def without_cp(config: Any, fsdp_plugin: Any) -> Any:
    """Return the ParallelismConfig of an accelerator to which all ranks are data parallel: shards, with FSDP."""
    sharded = fsdp_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return type(config)(
        dp_replicate_size=config.dp_replicate_size if sharded else 1,
        dp_shard_size=config.dp_shard_size * config.cp_size if sharded else 1,  # 1: accelerate then takes all ranks
        tp_size=config.tp_size, sp_size=config.sp_size, cp_size=1, cp_backend="torch",
    )  # fmt: skip


def share(accelerator: Any, config: Any) -> None:
    """Let an accelerator that was just made count groups of `cp_size` ranks, and share sequences among them.

    A Trainer, which may be making it, is distributed when it first trains, evaluates or predicts.
    """
    ranks, data = accelerator.state.num_processes, config.data_parallel_size
    if data > 1 and data * config.cp_size != ranks:
        raise UnsupportedError(
            f"{data} data-parallel groups of cp_size={config.cp_size} on {ranks} ranks",
            "their product is another number",
            "sizes whose product is the number of ranks, or the default dp sizes",
        )
    share_by_config(accelerator, config.cp_size, config.cp_handler)
    try:
        from transformers import Trainer
    except ImportError:
        return
    for name in ("train", "evaluate", "predict"):
        _replace(Trainer, name, _distribute_first)


def _distribute_first(own: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Distribute a Trainer whose accelerator asks for it, if it is not yet, and go on."""
    sharing = getattr(trainer.accelerator, "_dfa_sharing", None)
    if sharing is not None and sharing.by_config and sharing.trained is None:
        distribute_trainer(trainer, config=sharing.config)
    return own(trainer, *args, **kwargs)
