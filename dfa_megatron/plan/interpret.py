"""Run a rank's program over an algebra, in one generator for every kind of value.

`plan.language.program` defines steps, regions and merges; `plan.lowering` makes them from blocks and transfers.
Sets of tiles make it the checker, and tensors the runtime. The loop that is verified is the loop that runs, and so is
the `Accumulator`: it fills memory as planned. Not verified is the order of what a recorded phase replays.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Protocol, TypeVar

from dfa_megatron.plan.language.program import BufferMerges, Call, Destination, Merge, Program, RowsMerge, Step


class Algebra(Protocol):
    """The values of one rank, and what a step does to them."""

    def begin(self, step: int) -> None:
        """A step starts; what is received in it may be overwritten from now on."""

    def compute(self, call: Call) -> None:
        """Run one kernel call and merge its results into its writes."""

    def merge(self, merge: Merge) -> None:
        """Merge a landed partial into an accumulator."""

    def end(self, step: int) -> None:
        """The step's compute and merges are issued."""


def rank_loop(program: Program, algebra: Algebra) -> Generator[tuple[str, int, Step], None, None]:
    """Run one rank, and yield ("post" or "land", the step's number, the step).

    The driver moves the messages: it starts them at "post" and finishes them at "land".
    """
    for number, step in enumerate(program.steps):
        algebra.begin(number)
        yield "post", number, step
        for call in step.calls:
            algebra.compute(call)
        yield "land", number, step
        for merge in step.merges:
            algebra.merge(merge)
        algebra.end(number)


Values = TypeVar("Values")


class Memory(Protocol[Values]):
    """What an accumulator does with rows of results."""

    @property
    def in_place(self) -> bool:
        """Whether sums are kept in the memory of the result."""

    def new(self, rows: int, sum: bool) -> Values:
        """Return memory for so many rows of a sum, or of the result."""

    def part(self, rows: Values, lo: int, hi: int) -> Values:
        """Return a view of rows lo..hi of these."""

    def merge(self, parts: list[Values], into: Values) -> None:
        """Write the merge of one or more parts; one of them may be `into`."""

    def clear(self, rows: Values) -> None:
        """Set rows to the identity of the merge."""

    def fits(self, partial: Values, rows: int) -> bool:
        """Return whether a partial's own memory can be the result of so many rows."""


def accumulator_of(merges: BufferMerges, rows: int, memory: Memory[Values]) -> Accumulator[Values]:
    """Return the accumulator that these merges need; arguments as for `Accumulator`."""
    return (OrderedAccumulator if merges.ordered else Accumulator)(merges, rows, memory)


class Accumulator(Generic[Values]):
    """The rows of one name: saved partials, a sum and a result, each there only while it is needed.

    merges: as planned; the writes must come in their order. rows: of the whole accumulator. memory: holds and merges
    them.
    """

    def __init__(self, merges: BufferMerges, rows: int, memory: Memory[Values]) -> None:
        self._merges, self._count, self.memory = merges, rows, memory
        self._sum: Values | None = None
        self._result: Values | None = None
        self._saved: dict[int, tuple[int, Values]] = {}
        self._next = 0
        self._write_of_result = -1
        """The write whose partial's memory became the result."""

    def result(self) -> Values:
        """Return the memory of the result, which is whole once every write has come.

        A partial of all rows that came first has given its own memory. Values that no write reaches have the identity.
        """
        if self._result is None:
            self._result = self.memory.new(self._count, sum=False)
            for span in self._merges.empty:
                self.memory.clear(self.memory.part(self._result, span.lo, span.hi))
        return self._result

    def destination(self) -> Values | None:
        """Return the rows of the result that the next partial fills alone, or None: a kernel may write it there."""
        merging = self._merges.writes[self._next]
        adopted = merging.may_become_result and self._result is None
        if adopted or len(merging.rows) != 1:
            return None
        (only,) = merging.rows
        if only.saved or only.sum or only.skip or only.into is not Destination.RESULT:
            return None
        return self._place(only, Destination.RESULT)

    def write(self, partial: Values) -> None:
        """Merge the next partial. The accumulator owns a kernel's output from here on and may keep it as the result."""
        number, self._next = self._next, self._next + 1
        merging, memory = self._merges.writes[number], self.memory
        if merging.may_become_result and self._result is None and memory.fits(partial, self._count):
            self._result, self._write_of_result = partial, number
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
        in_result = to.into is Destination.RESULT or self.memory.in_place
        parts: list[Values] = []
        if to.sum:
            same = to.into is Destination.SUM or self.memory.in_place
            parts.append(into if same else self._place(to, Destination.SUM))
        for other in (*to.saved, number):
            if other == self._write_of_result and in_result:  # it lies in `into` already; the first need not be copied
                parts.insert(0, into)
            elif other == number:
                parts.append(rows)
            else:
                start, saved = self._saved[other]
                parts.append(self.memory.part(saved, to.lo - start, to.hi - start))
        if len(parts) > 1 or parts[0] is not into:
            self.memory.merge(parts, into)
        for other in to.freed:
            del self._saved[other]

    def _place(self, to: RowsMerge, into: Destination) -> Values:
        """Return rows of the result or of the sum; both share memory where their dtypes agree."""
        if into is Destination.RESULT or self.memory.in_place:
            return self.memory.part(self.result(), to.lo, to.hi)
        span = self._merges.sum
        if self._sum is None:
            self._sum = self.memory.new(len(span), sum=True)
        return self.memory.part(self._sum, to.lo - span.lo, to.hi - span.lo)


class OrderedAccumulator(Accumulator[Values]):
    """Rows whose partials merge two by two in a fixed tree: a partial waits until its sibling is there.

    writes       3         1         0                2
    happens      waits     waits     0+1 waits        2+3, then 01+23 is the result
    """

    def write(self, partial: Values) -> None:
        """Merge the next partial with all that it completes, node by node."""
        number, self._next = self._next, self._next + 1
        merging, memory = self._merges.writes[number], self.memory
        if merging.may_become_result and self._result is None and memory.fits(partial, self._count):
            self._result = partial
            return
        waits = [rows for rows in merging.rows if rows.into is Destination.SAVED]
        kept: Values | None = None
        if waits and merging.may_keep and not any(rows.saved for rows in waits):
            self._saved[number] = waits[0].lo - waits[0].skip, partial
        elif waits:
            start = min(rows.lo for rows in waits)
            kept = memory.new(max(rows.hi for rows in waits) - start, sum=True)
            self._saved[number] = start, kept
        for rows in merging.rows:
            mine = memory.part(partial, rows.skip, rows.skip + rows.hi - rows.lo)
            if rows.into is Destination.RESULT:
                self._fold(rows, mine, memory.part(self.result(), rows.lo, rows.hi), into_sum=memory.in_place)
            elif kept is not None:
                start, _ = self._saved[number]
                self._fold(rows, mine, memory.part(kept, rows.lo - start, rows.hi - start), into_sum=True)
            for other in rows.freed:
                del self._saved[other]

    def _fold(self, rows: RowsMerge, mine: Values, into: Values, *, into_sum: bool) -> None:
        """Merge rows of a partial with those that waited, one after another, and write the last node."""
        last = len(rows.saved) - 1
        if last < 0:
            self.memory.merge([mine], into)
        for at, (other, goes_first) in enumerate(zip(rows.saved, rows.first, strict=True)):
            start, saved = self._saved[other]
            sibling = self.memory.part(saved, rows.lo - start, rows.hi - start)
            node = into if at == last or into_sum else self.memory.new(rows.hi - rows.lo, sum=True)
            self.memory.merge([sibling, mine] if goes_first else [mine, sibling], node)
            mine = node
