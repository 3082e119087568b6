"""Prove the bytes of a rank's messages: what lives at once lies apart; recompute where each message must go."""

from __future__ import annotations

from itertools import pairwise

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.arena_places import ALIGNMENT, Arenas, Places


def prove_places(program: Program, places: Places, arenas: Arenas) -> None:
    """Prove that memory of different slots is apart, and that each message goes where its receiver reads it.

    Buffers of one slot never live at the same time, which the program's own proof shows.

    Raises:
        PlanError: names the rank, and the buffer or the message.
    """
    spans: dict[int | None, list[tuple[int, int]]] = {}
    for number, starts in places.starts.items():
        buffer, ends = program.buffers[number], list[tuple[int, int]]()
        for name, rows in buffer.parts:
            row_bytes = arenas.row_bytes[name]
            ends += [(start, start + rows * one) for start, one in zip(starts[name], row_bytes, strict=True)]
        ends.sort()
        if any(one[1] > other[0] for one, other in pairwise(ends)) or any(start % ALIGNMENT for start, _ in ends):
            raise PlanError(f"rank {program.rank}: the tensors of buffer {number} overlap, or are not aligned")
        spans.setdefault(buffer.slot, []).append((ends[0][0], ends[-1][1]))
    slots = sorted((min(start for start, _ in its), max(end for _, end in its)) for its in spans.values())
    if any(one[1] > other[0] for one, other in pairwise(slots)) or (slots and slots[-1][1] > places.nbytes):
        raise PlanError(f"rank {program.rank}: the slots of messages overlap, or do not fit in {places.nbytes} bytes")
    if places.starts != arenas.starts_on(program.rank):
        raise PlanError(f"rank {program.rank}: its messages land elsewhere than their senders know")
    for (step, peer), sent in places.sent.items():
        if sent != arenas.lands(step, program.rank, peer):
            raise PlanError(f"rank {program.rank}, step {step}: its message lands elsewhere than rank {peer} reads it")
