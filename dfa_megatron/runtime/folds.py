"""How each partial result is folded, row by row: what it meets there, and whether it is the last that comes.

A partial that is the first of its rows is kept as the kernel wrote it; the second and later ones are added to it in the
accumulator's dtype; the last goes straight into the dtype in which the result is wanted. So rows with one partial are
never copied, rows with two never pass through the accumulator's dtype, and no result is cast at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from dfa_megatron.plan.geometry import Span
from dfa_megatron.plan.program import Program, Write


class Place(Enum):
    """Where rows of an accumulator are: nowhere yet, the partial that came first, a sum, or the result."""

    NOTHING = "nothing"
    FIRST = "first"
    SUM = "sum"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a partial that are folded alike.

    lo, hi: rows of the buffer. skip: the partial's row for `lo`. old, into: where the rows are before and after.
    piece: the number of the write whose partial is read, or kept. drops: it is read for the last time.
    """

    lo: int
    hi: int
    skip: int
    old: Place
    into: Place
    piece: int = -1
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Folding:
    """How one write is done: in parts, or by taking the partial for the whole result (`adopts`)."""

    parts: tuple[Part, ...]
    adopts: bool


@dataclass(frozen=True, slots=True)
class BufferFolds:
    """How an accumulator is filled: its writes in their order, its rows that nothing is ever written to."""

    writes: tuple[Folding, ...]
    empty: tuple[Span, ...]


def plan_folds(program: Program) -> dict[int, BufferFolds]:
    """Work out the folds of every accumulator of a program."""
    writes: dict[int, list[tuple[Write, bool]]] = defaultdict(list)
    for step in program.steps:
        for call in step.calls:
            for write in call.writes:
                writes[write.region.buffer].append((write, True))
        for fold in step.folds:
            writes[fold.write.region.buffer].append((fold.write, False))
    return {
        number: _buffer_folds(buffer.parts[0][1], writes[number])
        for number, buffer in enumerate(program.buffers)
        if buffer.accumulates
    }


def _buffer_folds(rows: int, writes: list[tuple[Write, bool]]) -> BufferFolds:
    """`writes` are (write, whether the partial may be kept: a kernel's own output may, a landed message may not)."""
    edges = sorted({0, rows} | {edge for write, _ in writes for edge in (write.region.lo, write.region.hi)})
    parts: dict[int, list[Part]] = defaultdict(list)
    readers: dict[int, tuple[int, int]] = {}
    empty: list[Span] = []
    for lo, hi in pairwise(edges):
        order = [at for at, (write, _) in enumerate(writes) if write.region.lo <= lo and hi <= write.region.hi]
        if not order:
            empty.append(Span(lo, hi))
        for nth, at in enumerate(order):
            old = Place.NOTHING if nth == 0 else Place.FIRST if nth == 1 else Place.SUM
            last = nth == len(order) - 1
            into = Place.RESULT if last else Place.FIRST if nth == 0 else Place.SUM
            piece = order[0] if Place.FIRST in (old, into) else -1
            part = Part(lo, hi, lo - writes[at][0].region.lo, old, into, piece)
            before = parts[at][-1] if parts[at] else None
            if before and (before.hi, before.old, before.into, before.piece) == (lo, old, into, piece):
                parts[at][-1] = Part(before.lo, hi, before.skip, old, into, piece)
            else:
                parts[at].append(part)
            if old is Place.FIRST:
                readers[piece] = max(readers.get(piece, (-1, -1)), (at, len(parts[at]) - 1))
    for at, index in readers.values():
        part = parts[at][index]
        parts[at][index] = Part(part.lo, part.hi, part.skip, part.old, part.into, part.piece, drops=True)
    foldings = []
    for at, (_, keeps) in enumerate(writes):
        (first, *more) = parts[at]
        adopts = keeps and not more and first.old is Place.NOTHING and (first.lo, first.hi) == (0, rows)
        foldings.append(Folding(tuple(parts[at]), adopts and first.into is Place.RESULT))
    return BufferFolds(tuple(foldings), _joined(empty))


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    out: list[Span] = []
    for span in spans:
        if out and out[-1].hi == span.lo:
            out[-1] = Span(out[-1].lo, span.hi)
        else:
            out.append(span)
    return tuple(out)
