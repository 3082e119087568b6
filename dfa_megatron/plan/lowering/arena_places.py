"""Place in each rank's arena what lands there, and the messages of this rank in the arenas of their receivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.landings import Landings

RowBytes = Mapping[str, tuple[int, ...]]
"""name -> the bytes of a row of each of its tensors, all sequences of the batch together."""

ALIGNMENT = 128
"""Every tensor starts at a multiple of this many bytes, which suffices for any kernel's vector loads."""

Starts = dict[str, tuple[int, ...]]
"""name -> the first byte of each of its tensors in the arena."""


class Arenas:
    """The arenas of all ranks: the slots of each lie one after another, and buffers of a slot begin with it.

    Attributes:
        landings: of all ranks.
        row_bytes: of the names.
        nbytes: of the largest arena: every rank has one of that size.
    """

    def __init__(self, landings: Sequence[Landings], row_bytes: RowBytes) -> None:
        self.landings, self.row_bytes, self.nbytes = landings, row_bytes, 0
        self._slots: list[dict[int | None, int]] = []
        for one in landings:
            sizes: dict[int | None, int] = {}
            for buffer in one.buffers:
                size = sum(aligned(rows * row) for name, rows in buffer.parts for row in row_bytes[name])
                sizes[buffer.slot] = max(sizes.get(buffer.slot, 0), size)
            self._slots.append(dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False)))
            self.nbytes = max(self.nbytes, sum(sizes.values()))

    def starts_on(self, rank: int) -> dict[int, Starts]:
        """Return where the tensors of all receive buffers of a rank begin, by buffer."""
        first = len(self.landings[rank].own)
        return {number: self.starts(rank, number) for number in range(first, first + len(self.landings[rank].buffers))}

    def starts(self, rank: int, number: int) -> Starts:
        """Return where the tensors of one of them begin."""
        buffer = self.landings[rank].buffers[number - len(self.landings[rank].own)]
        at, found = self._slots[rank][buffer.slot], Starts()
        for name, rows in buffer.parts:
            *begin, at = accumulate((aligned(rows * row) for row in self.row_bytes[name]), initial=at)
            found[name] = tuple(begin)
        return found

    def lands(self, step: int, source: int, peer: int) -> tuple[int, ...]:
        """Return where each tensor of a message lands in its receiver's arena."""
        theirs = self.landings[peer]
        regions = [theirs.regions[step, source, at] for at in range(len(theirs.messages.incoming[step][source]))]
        starts = {region.buffer: self.starts(peer, region.buffer) for region in regions}
        return tuple(
            start + region.lo * row
            for region in regions
            for start, row in zip(starts[region.buffer][region.name], self.row_bytes[region.name], strict=True)
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Bytes in arenas.

    nbytes: of every arena. starts: buffer -> where its tensors begin, of what lands on this rank. sent: (step, peer) of
    a message -> where each of its tensors goes in the peer's arena.
    """

    nbytes: int
    starts: dict[int, Starts]
    sent: dict[tuple[int, int], tuple[int, ...]]


def place(program: Program, arenas: Arenas) -> Places:
    """Place the messages of a program."""
    messages = [(number, message.peer) for number, step in enumerate(program.steps) for message in step.sends]
    sent = {(step, peer): arenas.lands(step, program.rank, peer) for step, peer in messages}
    return Places(arenas.nbytes, arenas.starts_on(program.rank), sent)


def aligned(nbytes: int) -> int:
    """Return where a tensor may begin that follows one of so many bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
