"""What a program's memory looks like for tensors of one format: worked out once, so that a call only allocates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dfa_megatron.plan.program import Message, Program
from dfa_megatron.runtime.wire import Format


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """The memory of one rank's program.

    adopts: accumulators whose only write stores every row, so that the kernel's own output takes their place.
    sent: names of which this rank sends its own rows: they are packed into one flat buffer per call.
    slots: (slot, bytes) of what must be allocated beside the results at home.
    staging_bytes: the most that one step's messages need beside the buffers they are sent from.
    """

    program: Program
    format: Format
    adopts: frozenset[int]
    sent: frozenset[str]
    slots: tuple[tuple[int, int], ...]
    staging_bytes: int


def plan_memory(program: Program, format: Format) -> MemoryPlan:
    """Work out the memory of a program."""
    adopts = _written_once(program)
    sent = frozenset(regions[0].name for message in program.sends for regions in message.parts)
    slots: dict[int, int] = {}
    for number, buffer in enumerate(program.buffers):
        if buffer.slot is not None and number not in adopts:
            slots[buffer.slot] = format.nbytes(buffer.parts, buffer.accumulates)
    staging = max(
        (
            sum(format.nbytes(m.signature) for m in step.sends if not is_buffer(program, format, adopts, m))
            for step in program.steps
        ),
        default=0,
    )
    return MemoryPlan(program, format, adopts, sent, tuple(slots.items()), staging)


def is_buffer(program: Program, format: Format, adopts: frozenset[int], message: Message) -> bool:
    """A buffer's bytes are the message as they lie: one name, every row, already as it travels."""
    if len(message.parts) != 1 or len(message.parts[0]) != 1:
        return False
    (region,) = message.parts[0]
    buffer = program.buffers[region.buffer]
    if region.buffer in adopts or buffer.parts != message.signature:
        return False
    if buffer.slot is None and buffer.accumulates:
        return False  # a result at home is a tensor of its own per field
    return format.fields(region.name, buffer.accumulates) == format.fields(region.name)


def _written_once(program: Program) -> frozenset[int]:
    writes = [write for step in program.steps for call in step.calls for write in call.writes]
    folds = [fold.write for step in program.steps for fold in step.folds]
    count = Counter(write.region.buffer for write in (*writes, *folds))
    return frozenset(
        write.region.buffer
        for write in writes
        if count[write.region.buffer] == 1
        and (write.region.lo, write.region.hi) == (0, program.buffers[write.region.buffer].parts[0][1])
    )
