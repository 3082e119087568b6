"""Assign slots: buffers that never live at the same time share memory, so the peak does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Life:
    """The steps in which a buffer is first touched, last read or written by compute, and last sent on."""

    begin: int
    computed: int = -1
    moved: int = -1

    @property
    def end(self) -> int:
        """Return the last step of the buffer's life."""
        return max(self.begin, self.computed, self.moved)


def assign_slots(buffers: Sequence[tuple[tuple[str, int], ...]], lives: Sequence[Life]) -> list[int]:
    """Assign each buffer, given by its parts, a slot: the free one nearest in size, else a new one.

    A slot is as large as its largest buffer. Messages and accumulators share none, so each kind is assigned by itself.
    """
    slots = [-1] * len(buffers)
    free_from: list[int] = []
    sizes: list[int] = []
    for begin, end, number in sorted([(life.begin, life.end, number) for number, life in enumerate(lives)]):
        size = _size(buffers[number])
        usable = [(abs(sizes[slot] - size), to, slot) for slot, to in enumerate(free_from) if to < begin]
        if usable:
            *_, slot = min(usable)
            free_from[slot], sizes[slot] = end, max(sizes[slot], size)
        else:
            slot = len(sizes)
            free_from.append(end)
            sizes.append(size)
        slots[number] = slot
    return slots


def _size(parts: tuple[tuple[str, int], ...]) -> int:
    """Return rows times tensors of a head's width, an estimate that is good enough to match buffers and slots."""
    return sum(rows * _TENSORS[name] for name, rows in parts)


_TENSORS = {"q": 1, "kv": 2, "out": 1, "qdo": 2, "dq": 1, "dkv": 2}
