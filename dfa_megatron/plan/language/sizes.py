"""Sizes of one attention, which define the tensors of every name in memory and in messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import Phase

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of an element of each dtype that attention takes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one attention.

    Args:
        batch: sequences per call.
        heads, kv_heads: of q, and of k and v; kv_heads divides heads.
        head_dim, head_dim_v: of q and k, and of v and out (None: the same).
        dtype: of q, k, v, dout and out, as PyTorch names it.
        backward_needs: tensor that a helper's backward receives beside q, dout and lse: "out" or "delta" (paper,
            section 3.2 and appendix D).
        wide: results travel in the accumulator's dtype, as nodes of a tree have the same bits wherever they merge.

    Raises:
        UnsupportedError: a size is not positive, kv_heads does not divide heads, or there is no such dtype.
    """

    batch: int = 1
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    backward_needs: Literal["delta", "out"] = "out"
    wide: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) <= 0:
                raise UnsupportedError(f"{name}={getattr(self, name)}", "it must be positive", "1 or more")
        if self.heads % self.kv_heads:
            why = "heads must be a multiple of kv_heads"
            raise UnsupportedError(f"{self.heads} heads with {self.kv_heads} kv_heads", why, "for example equal counts")
        if self.backward_needs not in ("delta", "out"):
            raise UnsupportedError(f"backward_needs={self.backward_needs!r}", "there is no such value", "delta, out")
        if self.dtype not in BYTES:
            raise UnsupportedError(f"dtype={self.dtype!r}", "attention takes no such dtype", ", ".join(BYTES))

    @property
    def value_dim(self) -> int:
        """Return the head dimension of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def accumulator(self) -> str:
        """Return the dtype of lse, delta and sums: float64 for float64, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    def flops_per_pair(self, phase: Phase) -> int:
        """Return floating-point operations of one (query, key) pair over all heads: 2 products forward, 5 backward."""
        qk, pv = self.head_dim, self.value_dim
        products = qk + pv if phase.name == "forward" else 3 * qk + 2 * pv
        return 2 * self.batch * self.heads * products

    def fields(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """Return (field, heads, width) of the tensors of a name, in messages and in memory.

        A width of 0 is a statistic: one number of the accumulator's dtype. All else has q's dtype in messages.
        """
        heads, kv_heads, dim, dim_v = self.heads, self.kv_heads, self.head_dim, self.value_dim
        match name:
            case "q":
                return (("q", heads, dim),)
            case "kv":
                return ("k", kv_heads, dim), ("v", kv_heads, dim_v)
            case "out":
                return ("out", heads, dim_v), ("lse", heads, 0)
            case "qdo":
                is_delta = self.backward_needs == "delta"
                memory = ("minus_delta", heads, 0) if is_delta else ("out", heads, dim_v)
                return ("q", heads, dim), ("dout", heads, dim_v), ("lse", heads, 0), memory
            case "dq":
                return (("dq", heads, dim),)
            case "dkv":
                return ("dk", kv_heads, dim), ("dv", kv_heads, dim_v)
        raise ValueError(f"no name {name!r} travels: q, kv, out, qdo, dq, dkv do")

    def sent_as(self, name: str) -> str:
        """Return the dtype of the tensors of a name in a message, but for statistics."""
        return self.accumulator if self.wide and name in ("out", "dq", "dkv") else self.dtype

    def row_bytes(self, name: str) -> tuple[int, ...]:
        """Return the bytes of a row of each tensor of a name in a message."""
        number, statistic = BYTES[self.sent_as(name)], BYTES[self.accumulator]
        return tuple(self.batch * heads * (width * number or statistic) for _, heads, width in self.fields(name))
