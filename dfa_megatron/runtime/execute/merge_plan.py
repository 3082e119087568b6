"""How each partial result is merged, row by row: what it is merged with, and whether it is the last that comes.

A kernel's partials are kept as they are until several can be merged in one pass: with what has landed from another rank
(whose memory is needed again), when enough are there, or with the last one, which goes straight into the dtype in which
the result is wanted. So rows with one partial are never copied, few partials are summed without a detour through the
accumulator's dtype, and no result is cast at the end.
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

KEPT_BESIDE_A_SUM = 1
"""Partials kept where there is a sum already: a second one would cost more memory than the pass it saves."""


class Place(Enum):
    """Where rows go: they are kept as they came, or merged into the sum or the result."""

    KEPT = "kept"
    SUM = "sum"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a partial that are merged alike.

    lo, hi: rows of the buffer. skip: the partial's row for `lo`. kept: numbers of the writes whose partials are merged
    with it. sum: so is the sum. into: where to. drops: numbers of kept partials that nothing needs afterwards.
    """

    lo: int
    hi: int
    skip: int
    kept: tuple[int, ...]
    sum: bool
    into: Place
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Merging:
    """How one write is done: in parts, or by taking the partial for the whole result (`adopts`)."""

    parts: tuple[Part, ...]
    adopts: bool


@dataclass(frozen=True, slots=True)
class BufferMerges:
    """How an accumulator is filled.

    writes: in their order. empty: rows that nothing is ever written to. sum: the rows from the first to the last that
    is ever summed, no rows where none is.
    """

    writes: tuple[Merging, ...]
    empty: tuple[Span, ...]
    sum: Span


def plan_merges(program: Program) -> dict[int, BufferMerges]:
    """Work out the merges of every accumulator of a program."""
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
    """`writes` are (write, whether the partial may be kept: a kernel's own output may, a landed message may not)."""
    edges = sorted({0, rows} | {edge for write, _ in writes for edge in (write.region.lo, write.region.hi)})
    parts: dict[int, list[Part]] = defaultdict(list)
    empty: list[Span] = []
    for lo, hi in pairwise(edges):
        order = [at for at, (write, _) in enumerate(writes) if write.region.lo <= lo and hi <= write.region.hi]
        if not order:
            empty.append(Span(lo, hi))
        for at, kept, has_sum, into in _rows(order, writes):
            part = Part(lo, hi, lo - writes[at][0].region.lo, kept, has_sum, into)
            before = parts[at][-1] if parts[at] else None
            if before and (before.hi, before.kept, before.sum, before.into) == (lo, kept, has_sum, into):
                parts[at][-1] = replace(before, hi=hi)
            else:
                parts[at].append(part)
    summed = [part for of_write in parts.values() for part in of_write if part.into is Place.SUM]
    for of_write in parts.values():
        of_write.sort(key=lambda part: part.into is not Place.RESULT)  # what is kept for it may go before a sum comes
    _drop_after_last_use(parts)
    mergings = []
    for at, (write, keepable) in enumerate(writes):
        (first, *more) = parts[at]
        whole = (write.region.lo, write.region.hi) == (0, rows)
        alone = not more and not first.kept and not first.sum and first.into is Place.RESULT
        mergings.append(Merging(tuple(parts[at]), adopts=keepable and whole and alone))
    sum_rows = Span(min((part.lo for part in summed), default=0), max((part.hi for part in summed), default=0))
    return BufferMerges(tuple(mergings), _joined(empty), sum_rows)


def _rows(order: list[int], writes: list[tuple[Write, bool]]) -> Iterable[tuple[int, tuple[int, ...], bool, Place]]:
    """(write, kept writes it is merged with, whether the sum is too, where to) for rows that see these writes."""
    kept: tuple[int, ...] = ()
    has_sum = False
    for nth, at in enumerate(order):
        last = nth == len(order) - 1
        room = KEPT_BESIDE_A_SUM if has_sum else MOST_PARTS - 1
        if writes[at][1] and not last and len(kept) < room:
            yield at, (), False, Place.KEPT
            kept = (*kept, at)
        else:
            yield at, kept, has_sum, Place.RESULT if last else Place.SUM
            kept, has_sum = (), True


def _drop_after_last_use(parts: dict[int, list[Part]]) -> None:
    last: dict[int, tuple[int, int]] = {}
    for at in sorted(parts):
        for index, part in enumerate(parts[at]):
            for piece in part.kept:
                last[piece] = at, index
    for piece, (at, index) in last.items():
        parts[at][index] = replace(parts[at][index], drops=(*parts[at][index].drops, piece))


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    out: list[Span] = []
    for span in spans:
        if out and out[-1].hi == span.lo:
            out[-1] = Span(out[-1].lo, span.hi)
        else:
            out.append(span)
    return tuple(out)
