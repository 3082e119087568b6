"""Accumulators: the memory in which one rank's partial results are merged, for one run of one program."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dfa_megatron.kernels.merge import add, identity_, merge
from dfa_megatron.runtime.execute.merge_plan import BufferMerges, Part, Place
from dfa_megatron.runtime.execute.wire_format import Field, rows_of

Fields = tuple[torch.Tensor, ...]


class Accumulator:
    """The rows of one name: kept partials, a sum and a result, each there only while it is needed.

    Tensors that add are merged one after another, so that the partials of one are gone before the next needs a sum.

    Args:
        merges: how it is filled; writes must come in that order.
        rows, batch: its size.
        sums, results: the tensors of a sum and of the result.
        device: where they are.
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
        """The result, once every write has come."""
        return tuple(x for _, merged in self._merged for x in merged.result())

    def open(self) -> None:
        """Rows that nothing will be written to get the identity of the merge."""
        for _, merged in self._merged:
            merged.open()

    def write(self, partial: Fields) -> None:
        """Merge the next partial; a kernel's own output is the accumulator's from here on: kept, or the result."""
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
    """Then the sum is the result, in place."""
    _sum: Fields = ()
    _result: Fields = ()
    _kept: dict[int, tuple[int, Fields]] = field(default_factory=dict)
    _taken: int = -1
    """The kept partial whose memory is the result's."""
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
        if merging.adopts and all(x.dtype == field.dtype for x, field in zip(partial, self.results, strict=True)):
            self._result = partial
            return
        if any(part.into is Place.KEPT for part in merging.parts):
            first = merging.parts[0]
            self._kept[number] = first.lo - first.skip, partial
        for part in merging.parts:
            if part.into is not Place.KEPT:
                self._merge_parts(part, tuple(rows_of(x, part.skip, part.skip + part.hi - part.lo) for x in partial))
        if self._next == len(self.merges.writes):
            self._sum = ()

    def _merge_parts(self, part: Part, rows: Fields) -> None:
        into = self._rows(part, part.into)
        if not part.kept and not part.sum:
            for x, value in zip(into, rows, strict=True):
                x.copy_(value)
            return
        parts = []
        if part.sum:
            in_place = part.into is Place.SUM or self._one_dtype
            parts.append(into if in_place else self._rows(part, Place.SUM))
        for number in part.kept:
            if number == self._taken and (part.into is Place.RESULT or self._one_dtype):
                parts.insert(0, into)
            else:
                start, fields = self._kept[number]
                parts.append(tuple(rows_of(x, part.lo - start, part.hi - start) for x in fields))
        parts.append(rows)
        if self.with_lse:
            merge([(out, lse) for out, lse in parts], (into[0], into[1]))
        else:
            for x, values in zip(into, zip(*parts, strict=True), strict=True):
                add(values, x)
        for number in part.drops:
            del self._kept[number]

    def _rows(self, part: Part, place: Place) -> Fields:
        if place is Place.RESULT or self._one_dtype:
            return tuple(rows_of(x, part.lo, part.hi) for x in self._in_result(part.kept))
        span = self.merges.sum
        self._sum = self._sum or self._new(self.sums, len(span))
        return tuple(rows_of(x, part.lo - span.lo, part.hi - span.lo) for x in self._sum)

    def _in_result(self, kept: tuple[int, ...]) -> Fields:
        """The result's memory: that of a kept partial of all rows, of which some are now merged, or new.

        That partial is read before it is overwritten: none of its rows has been written to the result yet, and the
        merge that writes a row reads all that is kept of it.
        """
        if not self._result:
            self._taken = next((number for number in kept if self._is_like_result(self._kept[number][1])), -1)
            self._result = self._kept[self._taken][1] if self._taken >= 0 else self._new(self.results, self.rows)
        return self._result

    def _is_like_result(self, fields: Fields) -> bool:
        return all(
            x.dtype == field.dtype and x.shape == field.shape(self.batch, self.rows) and x.is_contiguous()
            for x, field in zip(fields, self.results, strict=True)
        )

    def _new(self, fields: tuple[Field, ...], rows: int) -> Fields:
        return tuple(torch.empty(f.shape(self.batch, rows), dtype=f.dtype, device=self.device) for f in fields)
