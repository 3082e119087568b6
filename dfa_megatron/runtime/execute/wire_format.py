"""The wire format: which fields a name consists of, and where they lie in a flat buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from dfa_megatron.kernels.api import accumulator_dtype

ALIGNMENT = 128
"""Every field starts at a multiple of this many bytes: enough for any kernel's vector loads."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a name: rows are (batch, rows, heads, width), a statistic (width 0) is (batch, heads, rows)."""

    name: str
    heads: int
    width: int
    dtype: torch.dtype

    def shape(self, batch: int, rows: int) -> tuple[int, ...]:
        """The tensor's shape for that many rows."""
        return (batch, rows, self.heads, self.width) if self.width else (batch, self.heads, rows)

    def nbytes(self, batch: int, rows: int) -> int:
        """Bytes of the tensor, without padding."""
        return batch * rows * self.heads * max(1, self.width) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Format:
    """The sizes and dtypes of one attention; from them follows what every name looks like in memory and on the wire.

    reads: whether a helped pair's backward sends delta or out (paper, section 3.2 and appendix D: 3 or 4 tensors).
    wire: the dtype of partial outputs and of gradients while they travel.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    wire: torch.dtype
    backward_needs: Literal["delta", "out"]

    def fields(self, name: str) -> tuple[Field, ...]:
        """The tensors of a name as they travel."""
        return _fields(self, name, self.wire)

    def sums(self, name: str) -> tuple[Field, ...]:
        """The tensors in which partials of a name are summed: in the accumulator's dtype."""
        return _fields(self, name, accumulator_dtype(self.dtype))

    def results(self, name: str) -> tuple[Field, ...]:
        """The tensors of a name as the call returns them: in q's dtype (lse in the accumulator's)."""
        return _fields(self, name, self.dtype)

    def nbytes(self, parts: Sequence[tuple[str, int]]) -> int:
        """Bytes of (name, rows) parts on the wire."""
        return sum(field.nbytes(self.batch, rows) for name, rows in parts for field in self.fields(name))

    def places(self, parts: Sequence[tuple[str, int]]) -> tuple[dict[str, tuple[Placed, ...]], int]:
        """Where the tensors of (name, rows) parts lie in memory of their own, and its size in bytes."""
        places: dict[str, tuple[Placed, ...]] = {}
        at = 0
        for name, rows in parts:
            placed = []
            for field in self.fields(name):
                placed.append(Placed(at, field.dtype, field.shape(self.batch, rows)))
                at += -(-field.nbytes(self.batch, rows) // ALIGNMENT) * ALIGNMENT
            places[name] = tuple(placed)
        return places, at


@dataclass(frozen=True, slots=True)
class Placed:
    """A dense tensor in a flat buffer: its first byte, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def moved(self, by: int) -> Placed:
        """The same tensor that many bytes further."""
        return Placed(self.start + by, self.dtype, self.shape)

    def rows(self, lo: int, hi: int) -> Placed:
        """Rows lo..hi of a tensor (batch, rows, heads, width); of some of them only where the batch is one."""
        if hi - lo == self.shape[1 if len(self.shape) == 4 else 2]:
            return self
        assert len(self.shape) == 4
        assert self.shape[0] == 1
        row = math.prod(self.shape[2:]) * self.dtype.itemsize
        return Placed(self.start + lo * row, self.dtype, (1, hi - lo, *self.shape[2:]))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, in a flat tensor of bytes."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return flat[self.start : end].view(self.dtype).view(self.shape)


@lru_cache(maxsize=4096)
def _fields(format: Format, name: str, partial: torch.dtype) -> tuple[Field, ...]:
    statistic = accumulator_dtype(format.dtype)
    q = Field("q", format.heads, format.head_dim, format.dtype)
    row = Field("out", format.heads, format.head_dim_v, format.dtype)
    match name:
        case "q":
            return (q,)
        case "kv":
            return (
                Field("k", format.kv_heads, format.head_dim, format.dtype),
                Field("v", format.kv_heads, format.head_dim_v, format.dtype),
            )
        case "out":
            return Field("out", format.heads, format.head_dim_v, partial), Field("lse", format.heads, 0, statistic)
        case "qdo":
            memory = Field("delta", format.heads, 0, statistic) if format.backward_needs == "delta" else row
            return (
                q,
                Field("dout", format.heads, format.head_dim_v, format.dtype),
                Field("lse", format.heads, 0, statistic),
                memory,
            )
        case "dq":
            return (Field("dq", format.heads, format.head_dim, partial),)
        case "dkv":
            return (
                Field("dk", format.kv_heads, format.head_dim, partial),
                Field("dv", format.kv_heads, format.head_dim_v, partial),
            )
    raise AssertionError(f"no such name: {name}")


def rows_of(tensor: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Rows lo..hi of a field: (batch, rows, heads, width) or (batch, heads, rows)."""
    if tensor.dim() == 4:
        return tensor[:, lo:hi] if hi - lo != tensor.shape[1] else tensor
    return tensor[:, :, lo:hi] if hi - lo != tensor.shape[2] else tensor
