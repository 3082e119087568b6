"""Plan how partial results are merged, row by row: with which stored partials, and into which destination.

A kernel's partials are saved until several can be merged in one pass: with a partial that landed from another rank
(its memory is needed again), when enough are there, or with the last one. The last merge writes the dtype of the
result. So rows with one partial are never copied, few partials are summed without a detour through the accumulator's
dtype, and no result is cast at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from dfa_megatron.kernels.merge import MOST_PARTS
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.program import Program, Write
from dfa_megatron.plan.language.quick import quick

SAVED_BESIDE_A_SUM = 1
"""Partials saved where there is a sum already: a second one would cost more memory than the pass it saves."""


class Destination(Enum):
    """Where rows of a partial go: saved as they came, or merged into the sum or the result."""

    SAVED = "saved"
    SUM = "sum"
    RESULT = "result"


@quick
@dataclass(frozen=True, slots=True)
class RowsMerge:
    """Rows of a partial that are merged alike.

    lo, hi: rows of the buffer. skip: the partial's row for `lo`. saved: indices of earlier writes merged in this step.
    sum: merge the running sum too. into: destination. freed: indices of saved partials that can be freed afterwards.
    """

    lo: int
    hi: int
    skip: int
    saved: tuple[int, ...]
    sum: bool
    into: Destination
    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteMerge:
    """How one write is merged; `may_stay`: a kernel's own output of all rows, whose memory may become the result."""

    rows: tuple[RowsMerge, ...]
    may_stay: bool


@dataclass(frozen=True, slots=True)
class BufferMerges:
    """How an accumulator is filled.

    writes: in their order. empty: rows that no write reaches. sum: the rows from the first to the last that is ever
    summed; empty where none is.
    """

    writes: tuple[WriteMerge, ...]
    empty: tuple[Span, ...]
    sum: Span


def plan_merges(program: Program) -> dict[int, BufferMerges]:
    """Plan the merges of every accumulator of a program."""
    writes: dict[int, list[tuple[Write, bool]]] = defaultdict(list)
    for step in program.steps:
        for call in step.calls:
            for write in call.writes:
                writes[write.region.buffer].append((write, True))
        for merge in step.merges:
            writes[merge.write.region.buffer].append((merge.write, False))
    return {
        number: _buffer_merges(buffer.parts[0][1], writes[number])
        for number, buffer in enumerate(program.buffers)
        if buffer.accumulates
    }


def _buffer_merges(rows: int, writes: list[tuple[Write, bool]]) -> BufferMerges:
    """Plan one accumulator.

    writes: with whether the partial may be saved. A kernel's own output may, a landed message may not.
    """
    edges = sorted({0, rows} | {edge for write, _ in writes for edge in (write.region.lo, write.region.hi)})
    ends = [(write.region.lo, write.region.hi) for write, _ in writes]
    merges: dict[int, list[RowsMerge]] = defaultdict(list)
    empty: list[Span] = []
    for lo, hi in pairwise(edges):
        order = [at for at, (first, end) in enumerate(ends) if first <= lo < end]
        if not order:
            empty.append(Span(lo, hi))
        for at, saved, has_sum, into in _rows(order, writes):
            before = merges[at][-1] if merges[at] else None
            if before and (before.hi, before.saved, before.sum, before.into) == (lo, saved, has_sum, into):
                merges[at][-1] = RowsMerge(before.lo, hi, before.skip, saved, has_sum, into)
            else:
                merges[at].append(RowsMerge(lo, hi, lo - ends[at][0], saved, has_sum, into))
    summed = [one for of_write in merges.values() for one in of_write if one.into is Destination.SUM]
    for of_write in merges.values():
        # Results first: they free saved partials before a sum is allocated.
        of_write.sort(key=lambda one: one.into is not Destination.RESULT)
    _free_after_last_use(merges)
    mergings = []
    for at, (write, may_save) in enumerate(writes):
        whole = (write.region.lo, write.region.hi) == (0, rows)
        mergings.append(WriteMerge(tuple(merges[at]), may_stay=may_save and whole))
    sum_rows = Span(min((one.lo for one in summed), default=0), max((one.hi for one in summed), default=0))
    return BufferMerges(tuple(mergings), _joined(empty), sum_rows)


def _rows(
    order: list[int], writes: list[tuple[Write, bool]]
) -> Iterable[tuple[int, tuple[int, ...], bool, Destination]]:
    """Yield (write, saved writes merged with it, whether the sum is too, destination) for rows with these writes."""
    saved: tuple[int, ...] = ()
    has_sum = False
    for nth, at in enumerate(order):
        last = nth == len(order) - 1
        room = SAVED_BESIDE_A_SUM if has_sum else MOST_PARTS - 1
        if writes[at][1] and not last and len(saved) < room:
            yield at, (), False, Destination.SAVED
            saved = (*saved, at)
        else:
            yield at, saved, has_sum, Destination.RESULT if last else Destination.SUM
            saved, has_sum = (), True


def _free_after_last_use(merges: dict[int, list[RowsMerge]]) -> None:
    last: dict[int, tuple[int, int]] = {}
    for at in sorted(merges):
        for index, rows_merge in enumerate(merges[at]):
            for number in rows_merge.saved:
                last[number] = at, index
    for number, (at, index) in last.items():
        merges[at][index] = replace(merges[at][index], freed=(*merges[at][index].freed, number))


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    out: list[Span] = []
    for span in spans:
        if out and out[-1].hi == span.lo:
            out[-1] = Span(out[-1].lo, span.hi)
        else:
            out.append(span)
    return tuple(out)
