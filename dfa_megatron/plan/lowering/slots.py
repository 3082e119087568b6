"""Assign slots: buffers that never live at the same time share memory, so the peak does not grow with the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dfa_megatron.plan.language.geometry import Span, covers
from dfa_megatron.plan.language.program import Buffer


class Stored:
    """Rows of each buffer that hold a result, in the order of the writes."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = defaultdict(list)

    def touches(self, buffer: int, rows: Span) -> bool:
        """Return whether any of these rows was written."""
        return any(old.lo < rows.hi and rows.lo < old.hi for old in self._spans[buffer])

    def add(self, buffer: int, rows: Span) -> bool:
        """Record a write; return whether all of these rows are new."""
        fresh = not self.touches(buffer, rows)
        self._spans[buffer].append(rows)
        return fresh

    def needs_identity(self, buffer: int, rows: int) -> bool:
        """Return whether one of the buffer's rows is merged into before it is stored, or is never stored."""
        stored: list[Span] = []
        for span in self._spans[buffer]:
            if not any(len(old & span) for old in stored):
                stored.append(span)
            elif not covers(stored, span):
                return True
        return not covers(stored, Span(0, rows))


class Lifetimes:
    """Record when each buffer is first touched, last read or written by compute, and last sent or received."""

    def __init__(self) -> None:
        self._begin: dict[int, int] = {}
        self._computed: dict[int, int] = defaultdict(lambda: -1)
        self._moved: dict[int, int] = defaultdict(lambda: -1)
        self._written: dict[int, int] = defaultdict(lambda: -1)
        self._sent_after: dict[int, int] = defaultdict(lambda: -1)

    def begin(self, buffer: int, step: int) -> None:
        """Start the buffer's life at this step; the first call counts."""
        self._begin.setdefault(buffer, step)

    def computed(self, buffer: int, step: int) -> None:
        """Record that compute (a kernel call or a merge) reads the buffer in this step."""
        self._computed[buffer] = max(self._computed[buffer], step)

    def written(self, buffer: int, step: int) -> None:
        """Record that compute writes the buffer in this step."""
        self._written[buffer] = max(self._written[buffer], step)
        self.computed(buffer, step)

    def moved(self, buffer: int, step: int) -> None:
        """Record that a message of this step leaves from, or lands in, the buffer."""
        self._moved[buffer] = max(self._moved[buffer], step)

    def sent_after_write(self, buffer: int, step: int) -> None:
        """Record that this step's message carries earlier writes of compute to the buffer."""
        self._sent_after[step] = max(self._sent_after[step], self._written[buffer])

    def interval(self, buffer: int) -> tuple[int, int]:
        """Return the first and last step of the buffer's life."""
        return self._begin[buffer], max(self._computed[buffer], self._moved[buffer], self._begin[buffer])

    def after(self, step: int, neighbours: Iterable[Iterable[int]]) -> int:
        """Return the last step whose compute must be over before this step's messages move.

        Args:
            step: the messages' step.
            neighbours: for each buffer that a message lands in, the buffers of its slot.
        """
        earlier = (self._computed[other] for slot in neighbours for other in slot if self._begin[other] < step)
        return max(self._sent_after[step], *earlier, -1)


def assign_slots(buffers: Sequence[Buffer], lives: Lifetimes, own: int) -> dict[int, int]:
    """Assign each buffer after the first `own` a slot: the free one nearest in size, else a new one.

    A slot is as large as its largest buffer. Accumulators have their own slots.
    """
    slots: dict[int, int] = {}
    free_from: dict[int, int] = {}
    shapes: dict[int, tuple[bool, int]] = {}
    for number in sorted(range(own, len(buffers)), key=lambda number: (lives.interval(number), number)):
        begin, end = lives.interval(number)
        accumulates, size = buffers[number].accumulates, _size(buffers[number])
        usable = [slot for slot, busy_to in free_from.items() if shapes[slot][0] == accumulates and busy_to < begin]
        slot = min(
            usable, key=lambda slot: (abs(shapes[slot][1] - size), free_from[slot], slot), default=len(free_from)
        )
        known = shapes.get(slot, (accumulates, 0))
        slots[number], free_from[slot], shapes[slot] = slot, end, (accumulates, max(known[1], size))
    return slots


def _size(buffer: Buffer) -> int:
    """Return rows times tensors of a head's width, an estimate that is good enough to match buffers and slots."""
    return sum(rows * _TENSORS[name] for name, rows in buffer.parts)


_TENSORS = {"q": 1, "kv": 2, "out": 1, "qdo": 2, "dq": 1, "dkv": 2}
