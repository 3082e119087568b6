"""Slots: buffers that never live at the same time share memory, so that the peak does not grow with the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dfa_megatron.plan.language.program import Buffer


class Lifetimes:
    """When each buffer is first touched, last read or written by compute, and last moved by a message."""

    def __init__(self) -> None:
        self._begin: dict[int, int] = {}
        self._computed: dict[int, int] = defaultdict(lambda: -1)
        self._moved: dict[int, int] = defaultdict(lambda: -1)
        self._written: dict[int, int] = defaultdict(lambda: -1)
        self._sent_after: dict[int, int] = defaultdict(lambda: -1)

    def begin(self, buffer: int, step: int) -> None:
        """The buffer is in use from this step on; the first call counts."""
        self._begin.setdefault(buffer, step)

    def computed(self, buffer: int, step: int) -> None:
        """Compute (a kernel call or a merge) reads the buffer in this step."""
        self._computed[buffer] = max(self._computed[buffer], step)

    def written(self, buffer: int, step: int) -> None:
        """Compute writes the buffer in this step."""
        self._written[buffer] = max(self._written[buffer], step)
        self.computed(buffer, step)

    def moved(self, buffer: int, step: int) -> None:
        """A message of this step is sent from, or lands in, the buffer."""
        self._moved[buffer] = max(self._moved[buffer], step)

    def sent_after_write(self, buffer: int, step: int) -> None:
        """This step's message carries what compute wrote into the buffer so far."""
        self._sent_after[step] = max(self._sent_after[step], self._written[buffer])

    def interval(self, buffer: int) -> tuple[int, int]:
        """First and last step of the buffer's life."""
        return self._begin[buffer], max(self._computed[buffer], self._moved[buffer], self._begin[buffer])

    def after(self, step: int, neighbours: Iterable[Iterable[int]]) -> int:
        """The last step whose compute must be over before this step's messages move.

        Args:
            step: the messages' step.
            neighbours: for each buffer that a message lands in, the buffers of its slot.
        """
        earlier = (self._computed[other] for slot in neighbours for other in slot if self._begin[other] < step)
        return max(self._sent_after[step], *earlier, -1)


def assign_slots(buffers: Sequence[Buffer], lives: Lifetimes, home: int) -> dict[int, int]:
    """Give each buffer but the first `home` a slot: a free one, as near to its size as there is, or a new one.

    A slot is as large as its largest buffer. Accumulators have slots of their own.
    """
    slots: dict[int, int] = {}
    free_from: dict[int, int] = {}
    shapes: dict[int, tuple[bool, int]] = {}
    for number in sorted(range(home, len(buffers)), key=lambda number: (lives.interval(number), number)):
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
    """Rows times tensors of a head's width: near enough to say which memory suits which buffer."""
    return sum(rows * _TENSORS[name] for name, rows in buffer.parts)


_TENSORS = {"q": 1, "kv": 2, "out": 1, "qdo": 2, "dq": 1, "dkv": 2}
