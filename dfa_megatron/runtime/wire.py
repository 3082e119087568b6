"""The wire format: which fields a name consists of, and where they lie in a flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.plan.program import Buffer

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
    reads: Literal["delta", "out"]

    def fields(self, name: str, accumulates: bool = False) -> tuple[Field, ...]:
        """The tensors of a name, in the accumulator's dtype or as they travel."""
        return _fields(self, name, accumulates)

    def nbytes(self, parts: Sequence[tuple[str, int]], accumulates: bool = False) -> int:
        """Bytes of a buffer with these (name, rows) parts."""
        return _places(self, tuple(parts), accumulates)[1]

    def views(self, flat: torch.Tensor, parts: Sequence[tuple[str, int]], accumulates: bool = False) -> Views:
        """The tensors that lie in a flat buffer of bytes, by name."""
        out: Views = {}
        for name, field, rows, start in _places(self, tuple(parts), accumulates)[0]:
            end = start + field.nbytes(self.batch, rows)
            view = flat[start:end].view(field.dtype).view(field.shape(self.batch, rows))
            out[name] = (*out.get(name, ()), view)
        return out

    def buffer_views(self, flat: torch.Tensor, buffer: Buffer) -> Views:
        """The tensors of a program's buffer in the memory of its slot."""
        return self.views(flat, buffer.parts, buffer.accumulates)


Views = dict[str, tuple[torch.Tensor, ...]]
"""The tensors of each name, in the order of `Format.fields`."""


@lru_cache(maxsize=4096)
def _fields(format: Format, name: str, accumulates: bool) -> tuple[Field, ...]:
    statistic = accumulator_dtype(format.dtype)
    partial = statistic if accumulates else format.wire
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
            memory = Field("delta", format.heads, 0, statistic) if format.reads == "delta" else row
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


@lru_cache(maxsize=4096)
def _places(
    format: Format, parts: tuple[tuple[str, int], ...], accumulates: bool
) -> tuple[tuple[tuple[str, Field, int, int], ...], int]:
    """(name, field, rows, first byte) of everything in a buffer, and its size."""
    places, at = [], 0
    for name, rows in parts:
        for field in format.fields(name, accumulates):
            places.append((name, field, rows, at))
            at += -(-field.nbytes(format.batch, rows) // ALIGNMENT) * ALIGNMENT
    return tuple(places), at


def rows_of(tensor: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Rows lo..hi of a field: (batch, rows, heads, width) or (batch, heads, rows)."""
    if tensor.dim() == 4:
        return tensor[:, lo:hi] if hi - lo != tensor.shape[1] else tensor
    return tensor[:, :, lo:hi] if hi - lo != tensor.shape[2] else tensor
