"""Save the inputs of checkpointed regions in host memory, by autograd's hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.errors import RematError
from dfa_megatron.remat.saved import HostKept

_CHANGED = (
    "The input of a rematerialized region was changed in place after the first pass, so the recompute cannot use it. "
    "Replace the in-place operation (such as a residual added in place)."
)


def keeping_inputs_on_host(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function that saves the inputs of its regions in pinned host memory.

    Args:
        checkpoint: a function that saves a region's inputs by autograd, and nothing else in its first pass: PyTorch's
            two forms, and the re-entrant functions of Megatron-Core, Transformer Engine and DeepSpeed.

    Raises:
        RematError: in the backward, where an input was changed in place since.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_input_to_host, _input_from_host):
            return checkpoint(*args, **kwargs)

    return run


def _input_to_host(x: torch.Tensor) -> torch.Tensor | HostKept:
    if not x.is_floating_point() or x.numel() == 0:  # token ids are small, and often those of all layers
        return x
    kept = HostKept(x)
    kept.settle()
    return kept


def _input_from_host(kept: torch.Tensor | HostKept) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    if kept.changed:
        raise RematError(_CHANGED)
    (x,) = kept.take()
    return x
