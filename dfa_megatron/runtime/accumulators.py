"""Accumulators: the memory in which one rank's partial results are folded, for one run of one program."""

from __future__ import annotations

import torch

from dfa_megatron.kernels.fold import add, identity_, merge
from dfa_megatron.runtime.folds import BufferFolds, Part, Place
from dfa_megatron.runtime.wire import Field, rows_of

Fields = tuple[torch.Tensor, ...]


class Accumulator:
    """The rows of one name: kept partials, a sum and a result, each there only while it is needed.

    Args:
        folds: how it is filled; writes must come in that order.
        rows, batch: its size.
        sums, results: the tensors of a sum and of the result.
        device: where they are.
        merges: fields are (out, lse) and merge; otherwise they add.
    """

    def __init__(
        self,
        folds: BufferFolds,
        batch: int,
        rows: int,
        sums: tuple[Field, ...],
        results: tuple[Field, ...],
        device: torch.device,
        *,
        merges: bool,
    ) -> None:
        self.folds, self.batch, self.rows, self.device, self.merges = folds, batch, rows, device, merges
        self._fields = {Place.SUM: sums, Place.RESULT: results}
        self._one_dtype = sums == results  # then the sum is the result, in place
        self._held: dict[Place, Fields] = {}
        self._kept: dict[int, tuple[int, Fields]] = {}
        self._next = 0

    @property
    def result(self) -> Fields:
        """The result, once every write has come."""
        return self._held[Place.RESULT]

    def open(self) -> None:
        """Rows that nothing will be written to get the identity of the fold."""
        for span in self.folds.empty:
            rows = tuple(rows_of(x, span.lo, span.hi) for x in self._whole(Place.RESULT))
            if self.merges:
                identity_(*rows)
            else:
                for x in rows:
                    x.zero_()

    def write(self, partial: Fields) -> None:
        """Fold the next partial; a kernel's own output must stay as it is, for it may be kept."""
        number, self._next = self._next, self._next + 1
        folding = self.folds.writes[number]
        wanted = self._fields[Place.RESULT]
        if folding.adopts and all(x.dtype == field.dtype for x, field in zip(partial, wanted, strict=True)):
            self._held[Place.RESULT] = partial
            return
        if any(part.into is Place.KEPT for part in folding.parts):
            first = folding.parts[0]
            self._kept[number] = first.lo - first.skip, partial
        for part in folding.parts:
            if part.into is not Place.KEPT:
                self._fold(part, tuple(rows_of(x, part.skip, part.skip + part.hi - part.lo) for x in partial))

    def _fold(self, part: Part, rows: Fields) -> None:
        if not part.kept and not part.sum:
            for x, value in zip(self._rows(part, part.into), rows, strict=True):
                x.copy_(value)
            return
        parts = [self._rows(part, Place.SUM)] if part.sum else []
        in_place = part.sum and (part.into is Place.SUM or self._one_dtype)
        into = parts[0] if in_place else self._rows(part, part.into)
        for number in part.kept:
            start, fields = self._kept[number]
            parts.append(tuple(rows_of(x, part.lo - start, part.hi - start) for x in fields))
        parts.append(rows)
        if self.merges:
            merge([(out, lse) for out, lse in parts], (into[0], into[1]))
        else:
            for x, values in zip(into, zip(*parts, strict=True), strict=True):
                add(values, x)
        for number in part.drops:
            del self._kept[number]

    def _rows(self, part: Part, place: Place) -> Fields:
        return tuple(rows_of(x, part.lo, part.hi) for x in self._whole(place))

    def _whole(self, place: Place) -> Fields:
        """The tensors of a place, allocated when they are first needed."""
        if self._one_dtype:
            place = Place.RESULT
        if place not in self._held:
            shapes = ((field.shape(self.batch, self.rows), field.dtype) for field in self._fields[place])
            self._held[place] = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
        return self._held[place]
