"""Checkpoint by DeepSpeed's function with attention run once, and configure that function from the JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dfa_megatron import remat
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `deepspeed.checkpointing.checkpoint`; its recompute takes attention's output and lse from the first pass.

    DeepSpeed's function does the checkpointing, so the settings of `deepspeed.checkpointing.configure` apply.

    Args:
        function: the region; tensors that need a gradient must be among its arguments.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    names, count = tuple(kwargs), len(args)

    def region(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return remat.remat_checkpoint(region, *args, *kwargs.values(), checkpoint=checkpointing.checkpoint)


def deepspeeds_function(settings: Mapping[str, Any], options: TrainingConfig) -> Callable[..., Any] | None:
    """Return DeepSpeed's checkpoint function, configured, if the JSON asks for `cpu_checkpointing`; otherwise None.

    The engine ignores that section. It affects only layers that DeepSpeed's own function checkpoints.

    Raises:
        UnsupportedError: cpu_checkpointing is on but no layer is checkpointed, or there is no GPU.
    """
    section = settings.get("activation_checkpointing") or {}
    if not section.get("cpu_checkpointing"):
        return None
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if not options.checkpoints_layers:
        raise UnsupportedError(
            "activation_checkpointing.cpu_checkpointing with dist_flash_attention.checkpoint 'auto' or 'none'",
            "no layer is checkpointed, so there is nothing to keep on the host",
            "checkpoint 'remat' or 'full'",
        )
    if options.remat_offload:
        raise UnsupportedError(
            "activation_checkpointing.cpu_checkpointing with dist_flash_attention.remat_offload",
            "both keep a layer's input in host memory",
            "remat_offload alone",
        )
    if get_accelerator().device_name() == "cpu":
        raise UnsupportedError(
            "activation_checkpointing.cpu_checkpointing on a CPU", "inputs are on the host already", "false"
        )
    checkpointing.configure(None, checkpoint_in_cpu=True, synchronize=section.get("synchronize_checkpoint_boundary"))
    own: Callable[..., Any] = checkpointing.checkpoint
    return own
