"""Fill an accumulator as its merges are planned, over any kind of rows: sets in the checker, tensors in a run."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from dfa_megatron.plan.language.program import BufferMerges, Destination, RowsMerge

Values = TypeVar("Values")


class Memory(Protocol[Values]):
    """What an accumulator does with rows of results.

    in_place: sums are kept in the memory of the result.
    """

    @property
    def in_place(self) -> bool:
        """See above."""
        ...

    def new(self, rows: int, sum: bool) -> Values:
        """Return memory for so many rows of a sum, or of the result."""
        ...

    def part(self, rows: Values, lo: int, hi: int) -> Values:
        """Return a view of rows lo..hi of these."""
        ...

    def merge(self, parts: list[Values], into: Values) -> None:
        """Write the merge of one or more parts; the first may be `into`."""
        ...

    def clear(self, rows: Values) -> None:
        """Set rows to the identity of the merge."""
        ...

    def fits(self, partial: Values, rows: int) -> bool:
        """Return whether a partial's own memory can be the result of so many rows."""
        ...


class Accumulator(Generic[Values]):
    """The rows of one name: saved partials, a sum and a result, each there only while it is needed.

    Args:
        merges: as planned; the writes must come in their order.
        rows: of the whole accumulator.
        memory: holds and merges them.
    """

    def __init__(self, merges: BufferMerges, rows: int, memory: Memory[Values]) -> None:
        self._merges, self._count, self._memory = merges, rows, memory
        self._sum: Values | None = None
        self._result: Values | None = None
        self._saved: dict[int, tuple[int, Values]] = {}
        self._next = 0
        self._stayed = -1
        """The write whose partial's memory became the result."""

    def result(self) -> Values:
        """Return the memory of the result, which is whole once every write has come.

        A partial of all rows that came first has given its own memory. Values that no write reaches have the identity.
        """
        if self._result is None:
            self._result = self._memory.new(self._count, sum=False)
            for span in self._merges.empty:
                self._memory.clear(self._memory.part(self._result, span.lo, span.hi))
        return self._result

    def write(self, partial: Values) -> None:
        """Merge the next partial. The accumulator owns a kernel's output from here on and may keep it as the result."""
        number, self._next = self._next, self._next + 1
        merging, memory = self._merges.writes[number], self._memory
        if merging.may_stay and self._result is None and memory.fits(partial, self._count):
            self._result, self._stayed = partial, number
        if any(rows.into is Destination.SAVED for rows in merging.rows):
            first = merging.rows[0]
            self._saved[number] = first.lo - first.skip, partial
        for rows in merging.rows:
            if rows.into is not Destination.SAVED:
                self._merge(number, rows, memory.part(partial, rows.skip, rows.skip + rows.hi - rows.lo))
        if self._next == len(self._merges.writes):
            self._sum = None

    def _merge(self, number: int, to: RowsMerge, rows: Values) -> None:
        into = self._place(to, to.into)
        in_result = to.into is Destination.RESULT or self._memory.in_place
        parts: list[Values] = []
        if to.sum:
            same = to.into is Destination.SUM or self._memory.in_place
            parts.append(into if same else self._place(to, Destination.SUM))
        for other in (*to.saved, number):
            if other == self._stayed and in_result:  # it lies in `into` already, and must come first
                parts.insert(0, into)
            elif other == number:
                parts.append(rows)
            else:
                start, saved = self._saved[other]
                parts.append(self._memory.part(saved, to.lo - start, to.hi - start))
        if len(parts) > 1 or parts[0] is not into:
            self._memory.merge(parts, into)
        for other in to.freed:
            del self._saved[other]

    def _place(self, to: RowsMerge, into: Destination) -> Values:
        """Return the rows of the result or of the sum, as whose memory the result serves where it can."""
        if into is Destination.RESULT or self._memory.in_place:
            return self._memory.part(self.result(), to.lo, to.hi)
        span = self._merges.sum
        if self._sum is None:
            self._sum = self._memory.new(len(span), sum=True)
        return self._memory.part(self._sum, to.lo - span.lo, to.hi - span.lo)
