"""Fill uninitialised memory with NaN, so that a read of unwritten memory fails a comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

ALLOCATORS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
"""The functions that return uninitialised memory."""


@contextmanager
def nan_memory() -> Iterator[None]:
    """While inside, the allocators of Python code return NaN, -1 for integers, 255 for uint8 and True for bool.

    What C++ code allocates for itself is not seen, nor is a name that was imported from torch before.
    """
    with ExitStack() as stack:
        for owner, name in ALLOCATORS:
            stack.enter_context(mock.patch.object(owner, name, _filled(getattr(owner, name))))
        yield


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with the value of uninitialised memory here, and return it."""
    if tensor.is_meta or not tensor.numel():
        return tensor
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        elif tensor.dtype == torch.uint8:
            tensor.fill_(255)
        elif not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            tensor.fill_(-1)
        elif tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(255)  # 0xFF is a NaN of the 8-bit formats
        else:
            tensor.fill_(float("nan"))
    return tensor


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def allocate_and_fill(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_and_fill
