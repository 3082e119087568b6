"""Memory layouts that GPU kernels take: last dimension contiguous, 16-byte vectors, no stride left to chance."""

from __future__ import annotations

import torch

_VECTOR_BYTES = 16


def dense(x: torch.Tensor) -> torch.Tensor:
    """x itself or a copy: contiguous, 16-byte aligned, and with the strides of a fresh tensor of its shape.

    A contiguous tensor may have any stride in a dimension of size 1; a kernel that sorts or compares strides minds it.
    """
    if not x.is_contiguous() or x.data_ptr() % _VECTOR_BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(-1).view(x.shape)


def vectorised(x: torch.Tensor) -> torch.Tensor:
    """x itself, strided as it is, or a contiguous copy where 16-byte loads of its rows are not possible."""
    per_vector = _VECTOR_BYTES // x.element_size()
    readable = x.stride(-1) == 1 and x.data_ptr() % _VECTOR_BYTES == 0
    if readable and all(stride % per_vector == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
