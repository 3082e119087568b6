"""The wire format: the fields of each name, and their places in a flat buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.runtime.cuda_driver import Copy

Fields = tuple[torch.Tensor, ...]
"""Tensors of a name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a name: rows are (batch, rows, heads, width), a statistic (width 0) is (batch, heads, rows)."""

    name: str
    heads: int
    width: int
    dtype: torch.dtype

    def shape(self, batch: int, rows: int) -> tuple[int, ...]:
        """Return the tensor's shape for that many rows."""
        return (batch, rows, self.heads, self.width) if self.width else (batch, self.heads, rows)


def fields_of(sizes: Sizes, name: str) -> tuple[Field, ...]:
    """Return the tensors of a name: in q's dtype, statistics in the accumulator's.

    They travel so, and the call returns them so. Only `ring` rounds a sum at every rank on its way; a wider wire takes
    15 % off the error of its dk and dv, and half as many bytes again.
    """
    return _typed(sizes, name, sizes.dtype)


def sent_of(sizes: Sizes, name: str) -> tuple[Field, ...]:
    """Return the tensors of a name as they travel."""
    return _typed(sizes, name, sizes.sent_as(name))


def sums_of(sizes: Sizes, name: str) -> tuple[Field, ...]:
    """Return the tensors in which partials of a name are merged, in the accumulator's dtype."""
    return _typed(sizes, name, sizes.accumulator)


@lru_cache(maxsize=4096)
def _typed(sizes: Sizes, name: str, dtype: str) -> tuple[Field, ...]:
    number, statistic = getattr(torch, dtype), getattr(torch, sizes.accumulator)
    return tuple(
        Field(field, heads, width, number if width else statistic) for field, heads, width in sizes.fields(name)
    )


def placed_at(sizes: Sizes, name: str, rows: int, starts: Sequence[int]) -> tuple[Placed, ...]:
    """Return the tensors of so many rows of a name that begin at these bytes."""
    pairs = zip(sent_of(sizes, name), starts, strict=True)
    return tuple(Placed(start, field.dtype, field.shape(sizes.batch, rows)) for field, start in pairs)


@dataclass(frozen=True, slots=True)
class Placed:
    """A dense tensor in a flat buffer: its first byte, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of a flat tensor of bytes."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return flat[self.start : end].view(self.dtype).view(self.shape)


def rows_of(tensor: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return rows lo..hi of a field (batch, rows, heads, width) or (batch, heads, rows)."""
    if tensor.dim() == 4:
        return tensor[:, lo:hi] if hi - lo != tensor.shape[1] else tensor
    return tensor[:, :, lo:hi] if hi - lo != tensor.shape[2] else tensor


def copy_of_rows(tensor: torch.Tensor, lo: int, hi: int, start: int, rows: int) -> Copy:
    """Return the copy of rows lo..hi of a dense field to byte `start`, into a field of `rows` rows."""
    assert tensor.is_contiguous(), "a rank's own rows are made dense before they are sent"
    count = tensor.shape[1] if tensor.dim() == 4 else tensor.shape[2]
    height = tensor.shape[0] if tensor.dim() == 4 else tensor.shape[0] * tensor.shape[1]
    row = tensor.nbytes // max(1, height * count)
    if (hi - lo) == count == rows:
        return Copy(0, start, tensor.nbytes)
    return Copy(lo * row, start, (hi - lo) * row, height, count * row, rows * row)
