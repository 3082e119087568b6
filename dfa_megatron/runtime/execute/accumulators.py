"""The memory of an accumulator of tensors, see `plan.interpret`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dfa_megatron.kernels.merge import add, identity_, merge
from dfa_megatron.runtime.execute.wire_format import Field, Fields, rows_of


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Tensors that are merged in one pass: (out, lse), or one gradient.

    sums, results: the tensors of a sum and of the result. device: of all.
    """

    batch: int
    sums: tuple[Field, ...]
    results: tuple[Field, ...]
    device: torch.device

    @property
    def in_place(self) -> bool:
        """Whether the sum has the result's dtype."""
        return self.sums == self.results

    def new(self, rows: int, sum: bool) -> Fields:
        """Allocate."""
        fields = self.sums if sum else self.results
        return tuple(torch.empty(f.shape(self.batch, rows), dtype=f.dtype, device=self.device) for f in fields)

    def part(self, rows: Fields, lo: int, hi: int) -> Fields:
        """Slice each tensor."""
        return tuple(rows_of(x, lo, hi) for x in rows)

    def merge(self, parts: list[Fields], into: Fields) -> None:
        """Merge (out, lse); add gradients; copy a single part."""
        if len(parts) == 1:
            for x, value in zip(into, parts[0], strict=True):
                x.copy_(value)
        elif len(into) == 2:
            merge([(out, lse) for out, lse in parts], (into[0], into[1]))
        else:
            add([x for (x,) in parts], into[0])

    def clear(self, rows: Fields) -> None:
        """Set out to 0 and lse to -inf, a gradient to 0."""
        if len(rows) == 2:
            identity_(*rows)
        else:
            rows[0].zero_()

    def fits(self, partial: Fields, rows: int) -> bool:
        """Return whether the partial is like a fresh result."""
        return all(
            x.dtype == field.dtype and x.shape == field.shape(self.batch, rows) and x.is_contiguous()
            for x, field in zip(partial, self.results, strict=True)
        )
