"""Accumulators: the memory in which one rank's partial results are merged, for one run of one program."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dfa_megatron.kernels.merge import add, identity_, merge
from dfa_megatron.runtime.execute.merge_plan import BufferMerges, Destination, RowsMerge
from dfa_megatron.runtime.execute.wire_format import Field, rows_of

Fields = tuple[torch.Tensor, ...]


class Accumulator:
    """The rows of one name: saved partials, a sum and a result, each there only while it is needed.

    Gradients are merged one after another, so the partials of one are freed before the next needs a sum.

    Args:
        merges: the planned merges; writes must come in their order.
        rows, batch: its size.
        sums, results: the tensors of a sum and of the result.
        device: of all tensors.
        with_lse: fields are (out, lse) and merge; otherwise they add.
    """

    def __init__(
        self,
        merges: BufferMerges,
        batch: int,
        rows: int,
        sums: tuple[Field, ...],
        results: tuple[Field, ...],
        device: torch.device,
        *,
        with_lse: bool,
    ) -> None:
        groups = [slice(0, 2)] if with_lse else [slice(at, at + 1) for at in range(len(results))]
        self._merged = [
            (group, _Merged(merges, batch, rows, sums[group], results[group], device, with_lse)) for group in groups
        ]

    @property
    def result(self) -> Fields:
        """Return the result, once every write has come."""
        return tuple(x for _, merged in self._merged for x in merged.result())

    def open(self) -> None:
        """Set rows that no write reaches to the identity of the merge."""
        for _, merged in self._merged:
            merged.open()

    def write(self, partial: Fields) -> None:
        """Merge the next partial. The accumulator owns a kernel's output from here on and may keep it as the result."""
        for group, merged in self._merged:
            merged.write(partial[group])


@dataclass(slots=True, eq=False)
class _Merged:
    """Tensors of an accumulator that are merged in one pass: (out, lse), or one gradient."""

    merges: BufferMerges
    batch: int
    rows: int
    sums: tuple[Field, ...]
    results: tuple[Field, ...]
    device: torch.device
    with_lse: bool
    _one_dtype: bool = field(init=False)
    """The sum is merged in place of the result."""
    _sum: Fields = ()
    _result: Fields = ()
    _saved: dict[int, tuple[int, Fields]] = field(default_factory=dict)
    _stayed: int = -1
    """The write whose partial's memory became the result."""
    _next: int = 0

    def __post_init__(self) -> None:
        self._one_dtype = self.sums == self.results

    def result(self) -> Fields:
        """See `Accumulator.result`."""
        assert self._result, "nothing was written"
        return self._result

    def open(self) -> None:
        """See `Accumulator.open`."""
        for span in self.merges.empty:
            rows = tuple(rows_of(x, span.lo, span.hi) for x in self._in_result())
            if self.with_lse:
                identity_(*rows)
            else:
                for x in rows:
                    x.zero_()

    def write(self, partial: Fields) -> None:
        """See `Accumulator.write`."""
        number, self._next = self._next, self._next + 1
        merging = self.merges.writes[number]
        if merging.may_stay and not self._result and self._is_like_result(partial):
            self._result, self._stayed = partial, number
        if any(rows.into is Destination.SAVED for rows in merging.rows):
            first = merging.rows[0]
            self._saved[number] = first.lo - first.skip, partial
        for rows in merging.rows:
            if rows.into is not Destination.SAVED:
                values = tuple(rows_of(x, rows.skip, rows.skip + rows.hi - rows.lo) for x in partial)
                self._merge_rows(number, rows, values)
        if self._next == len(self.merges.writes):
            self._sum = ()

    def _merge_rows(self, number: int, to: RowsMerge, rows: Fields) -> None:
        into, parts = self._rows(to, to.into), list[Fields]()
        in_result = to.into is Destination.RESULT or self._one_dtype
        if to.sum:
            parts.append(into if to.into is Destination.SUM or self._one_dtype else self._rows(to, Destination.SUM))
        for other in (*to.saved, number):
            if other == self._stayed and in_result:
                parts.insert(0, into)
            elif other == number:
                parts.append(rows)
            else:
                start, fields = self._saved[other]
                parts.append(tuple(rows_of(x, to.lo - start, to.hi - start) for x in fields))
        self._merge(parts, into)
        for other in to.freed:
            del self._saved[other]

    def _merge(self, parts: list[Fields], into: Fields) -> None:
        """Merge parts; the first may be `into`."""
        if len(parts) == 1:
            for x, value in zip(into, parts[0], strict=True) if parts[0] is not into else ():
                x.copy_(value)
        elif self.with_lse:
            merge([(out, lse) for out, lse in parts], (into[0], into[1]))
        else:
            for x, values in zip(into, zip(*parts, strict=True), strict=True):
                add(values, x)

    def _rows(self, to: RowsMerge, into: Destination) -> Fields:
        if into is Destination.RESULT or self._one_dtype:
            return tuple(rows_of(x, to.lo, to.hi) for x in self._in_result())
        span = self.merges.sum
        self._sum = self._sum or self._new(self.sums, len(span))
        return tuple(rows_of(x, to.lo - span.lo, to.hi - span.lo) for x in self._sum)

    def _in_result(self) -> Fields:
        """Return the memory of the result; a partial of all rows that came first has given its own."""
        self._result = self._result or self._new(self.results, self.rows)
        return self._result

    def _is_like_result(self, fields: Fields) -> bool:
        return all(
            x.dtype == field.dtype and x.shape == field.shape(self.batch, self.rows) and x.is_contiguous()
            for x, field in zip(fields, self.results, strict=True)
        )

    def _new(self, fields: tuple[Field, ...], rows: int) -> Fields:
        return tuple(torch.empty(f.shape(self.batch, rows), dtype=f.dtype, device=self.device) for f in fields)
