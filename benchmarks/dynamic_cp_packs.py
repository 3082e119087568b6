"""The packs of `dynamic_cp.py`: which documents which ranks compute together, by Megatron's schedulers and by ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

SLACK = 1.05
"""`default_dynamic_cp` lets a rank's work exceed the bound of the longest document by this factor."""


@dataclass
class Group:
    """Neighbouring ranks and the lengths of their documents."""

    size: int
    lengths: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return the tokens of each rank."""
        return ceil(sum(self.lengths) / self.size)

    @property
    def load(self) -> float:
        """Return a rank's work as the scheduler counts it: squares of lengths."""
        return sum(length * length for length in self.lengths) / self.size


MicroBatch = list[Group]
"""Groups of all ranks, in order."""


def in_order(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return packs of at most `most` tokens in the given order."""
    packs: list[list[int]] = [[]]
    for length in lengths:
        if packs[-1] and sum(packs[-1]) + length > most:
            packs.append([])
        packs[-1].append(length)
    return packs


def fixed(lengths: Sequence[int], ranks: int, budget: int, size: int) -> list[MicroBatch]:
    """Return Megatron's `dp_balanced`: packs in order, and single documents split off until replicas have equally many.

    Raises:
        ValueError: there are too few documents.
    """
    packs, replicas = in_order(lengths, size * budget), ranks // size
    while len(packs) % replicas:
        longest = max(packs, key=len)
        if len(longest) == 1:
            raise ValueError(f"{len(lengths)} documents for {replicas} replicas")
        packs.append([longest.pop()])
    groups = [Group(size, pack) for pack in packs]
    return [groups[lo : lo + replicas] for lo in range(0, len(groups), replicas)]


def all_ranks(lengths: Sequence[int], ranks: int, budget: int) -> list[MicroBatch]:
    """Return packs over all ranks, about equally long."""
    count = ceil(sum(lengths) / (ranks * budget))
    target = ceil(sum(lengths) / count)
    packs: list[list[int]] = [[]]
    for length in lengths:
        here = sum(packs[-1])
        if (len(packs) < count and here + length / 2 > target) or here + length > ranks * budget:
            packs.append([])
        packs[-1].append(length)
    return [[Group(ranks, pack)] for pack in packs]


def dynamic(lengths: Sequence[int], ranks: int, budget: int) -> list[MicroBatch]:
    """Return what Megatron's `default_dynamic_cp` makes of a batch (its `dev` branch of August 2026)."""
    waiting, found = sorted(lengths, reverse=True), []
    while waiting:
        groups, waiting = _micro_batch(waiting, ranks, budget)
        found.append(groups)
    return found


def _micro_batch(lengths: list[int], ranks: int, budget: int) -> tuple[MicroBatch, list[int]]:
    """Return one micro-batch and the documents left over, longest first."""
    first, *others = lengths
    groups, left, bound = [Group(_needed(first, budget), [first])], [], first * budget * SLACK
    for length in others:
        place = _place(groups, length, ranks, budget, bound)
        if place is None:
            left.append(length)
        elif place.lengths:
            place.lengths.append(length)
        else:
            place.lengths.append(length)
            groups.append(place)
    while (free := ranks - sum(group.size for group in groups)) > 0:
        least = min(group.size for group in groups)
        if least > free:
            (whole, *rest) = in_order(lengths, ranks * budget)
            return [Group(ranks, whole)], [length for pack in rest for length in pack]
        next(group for group in groups if group.size == least).size *= 2
    return groups, left


def _place(groups: MicroBatch, length: int, ranks: int, budget: int, bound: float) -> Group | None:
    """Return the group, possibly a new empty one, with the least load of the busiest rank; None: it must wait."""
    busiest, free = max(group.load for group in groups), ranks - sum(group.size for group in groups)
    best, least, size = None, bound, _needed(length, budget)
    while size <= ranks:
        cost = length * length / size
        fits = [g for g in groups if g.size == size and sum(g.lengths) + length <= size * budget]
        for group in [*fits, *([Group(size)] if free >= size else [])]:
            load = max(busiest, group.load + cost)
            if load < least or (best is None and load <= least):
                best, least = group, load
        size *= 2
    return best


def _needed(length: int, budget: int) -> int:
    """Return the smallest power of two ranks whose budget holds a document."""
    size = 1
    while size * budget < length:
        size *= 2
    return size
