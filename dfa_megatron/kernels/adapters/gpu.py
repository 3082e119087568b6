"""The common ground of GPU kernels: refusals, memory layouts, and determinism for the length of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from dfa_megatron.kernels.api import Need

_VECTOR_BYTES = 16


def gpu_refusal(need: Need) -> str | None:
    """Return why no kernel of PyTorch's CUDA build serves the need, or None."""
    if torch.device(need.device).type != "cuda":
        return f"it runs on CUDA, not on {need.device}"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, not {need.dtype}"
    if need.head_dim % 8 or need.head_dim_v % 8:
        return f"head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) must be multiples of 8"
    if need.capability is None or need.capability < (8, 0):
        return f"it needs compute capability 8.0 (Ampere) or newer, not {capability_text(need)}"
    return None


def equal_dims_refusal(need: Need) -> str | None:
    """Return `gpu_refusal`, or why a kernel with one head_dim, 256 at most, cannot serve the need, or None."""
    if why := gpu_refusal(need):
        return why
    if need.head_dim != need.head_dim_v:
        return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
    return f"head_dim {need.head_dim} is over 256" if need.head_dim > 256 else None


def build_refusal() -> str | None:
    """Return why this PyTorch has no CUDA kernels, or None."""
    return None if torch.version.cuda else f"PyTorch {torch.__version__} is built without CUDA"


def capability_text(need: Need) -> str:
    """Return the compute capability as people write it."""
    return "an unknown one" if need.capability is None else "{}.{}".format(*need.capability)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x or a copy: contiguous, 16-byte aligned, and with the strides of a fresh tensor of its shape.

    A contiguous tensor may have any stride in a dimension of size 1; a kernel that sorts or compares strides minds it.
    """
    if not x.is_contiguous() or x.data_ptr() % _VECTOR_BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(-1).view(x.shape)


def vectorised(x: torch.Tensor) -> torch.Tensor:
    """Return x with its strides, or a contiguous copy where 16-byte loads of its rows are not possible."""
    *outer, last = x.stride()
    if last == 1 and x.data_ptr() % _VECTOR_BYTES == 0:
        per_vector = _VECTOR_BYTES // x.element_size()
        for stride in outer:
            if stride % per_vector:
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Ask PyTorch's operators for their deterministic algorithm inside, and leave its settings as they were.

    The settings belong to the process: another thread may run deterministically meanwhile, which is slower, not wrong.
    """
    before = torch.get_deterministic_debug_mode()
    if not wanted or before == 2:
        yield
        return
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = fill
