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
    _reused: int = -1
    """The saved partial whose memory is reused for the result."""
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
            rows = tuple(rows_of(x, span.lo, span.hi) for x in self._in_result(()))
            if self.with_lse:
                identity_(*rows)
            else:
                for x in rows:
                    x.zero_()

    def write(self, partial: Fields) -> None:
        """See `Accumulator.write`."""
        number, self._next = self._next, self._next + 1
        merging = self.merges.writes[number]
        if merging.is_result and all(x.dtype == field.dtype for x, field in zip(partial, self.results, strict=True)):
            self._result = partial
            return
        if any(rows.into is Destination.SAVED for rows in merging.rows):
            first = merging.rows[0]
            self._saved[number] = first.lo - first.skip, partial
        for rows in merging.rows:
            if rows.into is not Destination.SAVED:
                self._merge_rows(rows, tuple(rows_of(x, rows.skip, rows.skip + rows.hi - rows.lo) for x in partial))
        if self._next == len(self.merges.writes):
            self._sum = ()

    def _merge_rows(self, to: RowsMerge, rows: Fields) -> None:
        into = self._rows(to, to.into)
        if not to.saved and not to.sum:
            for x, value in zip(into, rows, strict=True):
                x.copy_(value)
            return
        parts = []
        if to.sum:
            in_place = to.into is Destination.SUM or self._one_dtype
            parts.append(into if in_place else self._rows(to, Destination.SUM))
        for number in to.saved:
            if number == self._reused and (to.into is Destination.RESULT or self._one_dtype):
                parts.insert(0, into)
            else:
                start, fields = self._saved[number]
                parts.append(tuple(rows_of(x, to.lo - start, to.hi - start) for x in fields))
        parts.append(rows)
        if self.with_lse:
            merge([(out, lse) for out, lse in parts], (into[0], into[1]))
        else:
            for x, values in zip(into, zip(*parts, strict=True), strict=True):
                add(values, x)
        for number in to.freed:
            del self._saved[number]

    def _rows(self, to: RowsMerge, into: Destination) -> Fields:
        if into is Destination.RESULT or self._one_dtype:
            return tuple(rows_of(x, to.lo, to.hi) for x in self._in_result(to.saved))
        span = self.merges.sum
        self._sum = self._sum or self._new(self.sums, len(span))
        return tuple(rows_of(x, to.lo - span.lo, to.hi - span.lo) for x in self._sum)

    def _in_result(self, saved: tuple[int, ...]) -> Fields:
        """Return memory for the result: reuse a saved partial that covers all rows, else allocate.

        The partial is read before it is overwritten: no row has been written to the result yet, and the merge that
        writes a row reads every saved partial of it.
        """
        if not self._result:
            self._reused = next((number for number in saved if self._is_like_result(self._saved[number][1])), -1)
            self._result = self._saved[self._reused][1] if self._reused >= 0 else self._new(self.results, self.rows)
        return self._result

    def _is_like_result(self, fields: Fields) -> bool:
        return all(
            x.dtype == field.dtype and x.shape == field.shape(self.batch, self.rows) and x.is_contiguous()
            for x, field in zip(fields, self.results, strict=True)
        )

    def _new(self, fields: tuple[Field, ...], rows: int) -> Fields:
        return tuple(torch.empty(f.shape(self.batch, rows), dtype=f.dtype, device=self.device) for f in fields)
