"""Place in each rank's arena what lands there, and the messages of this rank in the arenas of their receivers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.landings import Landings

RowBytes = Mapping[str, tuple[int, ...]]
"""name -> the bytes of a row of each of its tensors, all sequences of the batch together."""

ALIGNMENT = 128
"""Every tensor starts at a multiple of this many bytes, which suffices for any kernel's vector loads."""

Starts = dict[int, dict[str, tuple[int, ...]]]
"""buffer -> name -> the first byte of each of its tensors in the arena."""


@dataclass(frozen=True, slots=True)
class Places:
    """Bytes in arenas.

    nbytes: the largest arena that any rank needs: equal on all ranks. starts: of what lands on this rank. sent: (step,
    peer) of a message -> where each of its tensors goes in the peer's arena.
    """

    nbytes: int
    starts: Starts
    sent: dict[tuple[int, int], tuple[int, ...]]


def place(program: Program, landings: Sequence[Landings], row_bytes: RowBytes) -> Places:
    """Place the messages of a program; the landings of all ranks say where they go."""
    arenas = [starts_of(one, row_bytes) for one in landings]
    messages = [(number, message.peer) for number, step in enumerate(program.steps) for message in step.sends]
    sent = {
        (step, peer): tuple(places_of(landings[peer], arenas[peer][1], row_bytes, step, program.rank))
        for step, peer in messages
    }
    return Places(max(nbytes for nbytes, _ in arenas), arenas[program.rank][1], sent)


def starts_of(landings: Landings, row_bytes: RowBytes) -> tuple[int, Starts]:
    """Return the bytes of a rank's arena, and where its buffers lie there: those of a slot at the same place."""
    sizes: dict[int | None, int] = {}
    tensors = [
        [(name, aligned(rows * one)) for name, rows in buffer.parts for one in row_bytes[name]]
        for buffer in landings.buffers
    ]
    for buffer, its in zip(landings.buffers, tensors, strict=True):
        sizes[buffer.slot] = max(sizes.get(buffer.slot, 0), sum(size for _, size in its))
    slots = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    starts: Starts = {}
    for number, (buffer, its) in enumerate(zip(landings.buffers, tensors, strict=True), len(landings.own)):
        ends = accumulate((size for _, size in its), initial=slots[buffer.slot])
        starts[number] = {name: () for name, _ in its}
        for (name, _), start in zip(its, ends, strict=False):
            starts[number][name] += (start,)
    return sum(sizes.values()), starts


def places_of(landings: Landings, starts: Starts, row_bytes: RowBytes, step: int, source: int) -> Iterator[int]:
    """Yield where each tensor of a message lands in its receiver's arena; arguments are the receiver's."""
    for at in range(len(landings.messages.incoming[step][source])):
        region = landings.regions[step, source, at]
        for start, row in zip(starts[region.buffer][region.name], row_bytes[region.name], strict=True):
            yield start + region.lo * row


def aligned(nbytes: int) -> int:
    """Return where a tensor may begin that follows one of so many bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
