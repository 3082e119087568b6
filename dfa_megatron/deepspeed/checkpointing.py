"""A drop-in for `deepspeed.checkpointing.checkpoint` in which attention runs once, and DeepSpeed's options for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dfa_megatron import remat
from dfa_megatron.deepspeed.json_block import KEY
from dfa_megatron.errors import UnsupportedError


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`deepspeed.checkpointing.checkpoint`, whose recompute takes attention's output and lse from the first pass.

    DeepSpeed's own function does the checkpointing, so what `deepspeed.checkpointing.configure` was told holds.

    Args:
        function: the region; tensors that need a gradient must be among its arguments.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    names, count = tuple(kwargs), len(args)

    def region(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return remat.remat_checkpoint(region, *args, *kwargs.values(), checkpoint=checkpointing.checkpoint)


def deepspeeds_function(settings: Mapping[str, Any], checkpoint_kind: str) -> Callable[..., Any] | None:
    """DeepSpeed's checkpoint function, configured, if the JSON asks for `cpu_checkpointing`; otherwise None.

    The engine reads that section and does nothing with it: it holds for layers that are checkpointed by DeepSpeed's own
    function only.

    Raises:
        UnsupportedError: it asks for it, and the block for no checkpointing, or there is no GPU.
    """
    section = settings.get("activation_checkpointing") or {}
    if not section.get("cpu_checkpointing"):
        return None
    if checkpoint_kind == "none":
        raise UnsupportedError(
            f"activation_checkpointing.cpu_checkpointing with {KEY}.checkpoint 'none'",
            "no layer is checkpointed, so there is nothing to keep on the host",
            "checkpoint 'remat' or 'full'",
        )
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if get_accelerator().device_name() == "cpu":
        raise UnsupportedError(
            "activation_checkpointing.cpu_checkpointing on a CPU", "inputs are on the host already", "false"
        )
    checkpointing.configure(None, checkpoint_in_cpu=True, synchronize=section.get("synchronize_checkpoint_boundary"))
    own: Callable[..., Any] = checkpointing.checkpoint
    return own
