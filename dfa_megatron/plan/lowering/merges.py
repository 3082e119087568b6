"""Plan how partial results are merged, row by row: with which stored partials, and into which destination.

A kernel's partials are saved until several can be merged in one pass: with a partial that landed from another rank
(its memory is needed again), when enough are there, or with the last one. The last merge writes the dtype of the
result. So rows with one partial are never copied, few partials are summed without a detour through the accumulator's
dtype, and no result is cast at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from dfa_megatron.plan.language.geometry import Span, joined_spans
from dfa_megatron.plan.language.program import BufferMerges, Destination, Region, RowsMerge, Step, WriteMerge

MOST_PARTS = 4
"""Partials that the kernels merge in one pass."""

Writes = Sequence[tuple[Region, bool]]
"""Rows of an accumulator in the order of their writes, and whether the partial may be saved.

A kernel's own output may. A landed message may not: its memory is needed again.
"""


def plan_merges(steps: Iterable[Step], rows: Mapping[int, int]) -> dict[int, BufferMerges]:
    """Plan the merges of every accumulator, given as buffer -> its rows."""
    writes: dict[int, list[tuple[Region, bool]]] = defaultdict(list)
    for step in steps:
        for call in step.calls:
            for region in call.writes:
                writes[region.buffer].append((region, True))
        for merge in step.merges:
            writes[merge.write.buffer].append((merge.write, False))
    return {buffer: merges_of(count, writes[buffer]) for buffer, count in rows.items()}


def merges_of(rows: int, writes: Writes) -> BufferMerges:
    """Plan one accumulator of so many rows."""
    ends = [(region.lo, region.hi) for region, _ in writes]
    edges = sorted({0, rows, *(edge for both in ends for edge in both)})
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
    free_after_last_use(merges)
    sum_rows = Span(min((one.lo for one in summed), default=0), max((one.hi for one in summed), default=0))
    mergings = (
        WriteMerge(tuple(merges[at]), may_become_result=may_save and ends[at] == (0, rows))
        for at, (_, may_save) in enumerate(writes)
    )
    return BufferMerges(tuple(mergings), tuple(joined_spans(empty)), sum_rows)


def _rows(order: Sequence[int], writes: Writes) -> Iterable[tuple[int, tuple[int, ...], bool, Destination]]:
    """Yield (write, saved writes merged with it, whether the sum is too, destination) for rows with these writes."""
    saved: tuple[int, ...] = ()
    has_sum = False
    for nth, at in enumerate(order):
        last = nth == len(order) - 1
        room = 1 if has_sum else MOST_PARTS - 1  # beside a sum a second one costs more memory than the pass it saves
        if writes[at][1] and not last and len(saved) < room:
            yield at, (), False, Destination.SAVED
            saved = (*saved, at)
        else:
            yield at, saved, has_sum, Destination.RESULT if last else Destination.SUM
            saved, has_sum = (), True


def free_after_last_use(merges: dict[int, list[RowsMerge]]) -> None:
    """Note where each saved partial is merged for the last time."""
    last: dict[int, tuple[int, int]] = {}
    for at in sorted(merges):
        for index, rows_merge in enumerate(merges[at]):
            for number in rows_merge.saved:
                last[number] = at, index
    for number, (at, index) in last.items():
        merges[at][index] = replace(merges[at][index], freed=(*merges[at][index].freed, number))
