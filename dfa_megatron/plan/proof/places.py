"""Prove the bytes of a rank's messages: what lives at once lies apart; recompute where each message must go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.arena_places import ALIGNMENT, Places, RowBytes, places_of, starts_of
from dfa_megatron.plan.lowering.landings import Landings


def prove_places(program: Program, places: Places, landings: Sequence[Landings], row_bytes: RowBytes) -> None:
    """Prove that memory of different slots is apart, and that each message goes where its receiver reads it.

    Buffers of one slot never live at the same time, which the program's own proof shows. landings: of all ranks.

    Raises:
        PlanError: names the rank, and the buffer or the message.
    """
    spans: dict[int | None, list[tuple[int, int]]] = {}
    for number, starts in places.starts.items():
        buffer, ends = program.buffers[number], list[tuple[int, int]]()
        for name, rows in buffer.parts:
            ends += [(start, start + rows * one) for start, one in zip(starts[name], row_bytes[name], strict=True)]
        ends.sort()
        if any(one[1] > other[0] for one, other in pairwise(ends)) or any(start % ALIGNMENT for start, _ in ends):
            raise PlanError(f"rank {program.rank}: the tensors of buffer {number} overlap, or are not aligned")
        spans.setdefault(buffer.slot, []).append((ends[0][0], ends[-1][1]))
    slots = sorted((min(start for start, _ in its), max(end for _, end in its)) for its in spans.values())
    if any(one[1] > other[0] for one, other in pairwise(slots)) or (slots and slots[-1][1] > places.nbytes):
        raise PlanError(f"rank {program.rank}: the slots of messages overlap, or do not fit in {places.nbytes} bytes")
    if places.starts != starts_of(landings[program.rank], row_bytes)[1]:
        raise PlanError(f"rank {program.rank}: its messages land elsewhere than their senders know")
    theirs = {peer: starts_of(landings[peer], row_bytes)[1] for _, peer in places.sent}
    for (step, peer), sent in places.sent.items():
        if sent != tuple(places_of(landings[peer], theirs[peer], row_bytes, step, program.rank)):
            raise PlanError(f"rank {program.rank}, step {step}: its message lands elsewhere than rank {peer} reads it")
