"""Assign blocks greedily: ranks with much work give blocks to ranks with little, by area, at the least traffic.

Every block starts with the owner of its rows. While the most loaded rank exceeds the mean by more than TOLERANCE, it
gives a block to a rank with less work. The candidates are the owner of the block's keys, the least loaded rank that
already reads the same rows or keys, and the least loaded rank of all. The move that costs the fewest transferred rows
per pair of work is taken. Short documents therefore stay in place, and a pack with long documents on one side is
balanced, whatever the mask.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator

from dfa_megatron.plan.language.ir import Block, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules.step_order import Pair, assign_steps

TOLERANCE = 0.03
"""Tolerated work above the mean, as a share of the mean."""

PRICE = {"q": 2.0, "kv": 0.5}
"""The cost of a remote row by side, in transferred rows of q: q and its result, or keys with four query heads each."""

CANDIDATES = 24
"""Blocks of a rank that are considered for one move."""


def greedy(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks of nearly equal work per rank, on any mask and layout: first local, then help, then own rows."""
    return assign_steps(_Balance(mask, layout).run(), mask, layout)


class _Balance:
    """The assignment of pairs to ranks, while blocks change hands."""

    def __init__(self, mask: Mask, layout: Layout) -> None:
        needed = needed_pairs(mask, layout)
        self.owner = layout.owner
        self.rows = [len(chunk) for chunk in layout.chunks]
        self.area = {pair: sum(tile.area for tile in tiles) for pair, tiles in needed.items()}
        self.ranks = layout.ranks
        self.mean = sum(self.area.values()) / self.ranks
        self.load = [0] * self.ranks
        self.owned: list[list[Pair]] = [[] for _ in range(self.ranks)]  # by area, the largest first
        # Number of blocks of a rank that read a chunk on this side: a chunk that one reads already comes for free.
        self.readers: Counter[tuple[int, str, int]] = Counter()
        self.holders: dict[tuple[str, int], set[int]] = defaultdict(set)
        for pair in needed:
            self._assign(self.owner[pair[0]], pair, 1)

    def run(self) -> list[list[Pair]]:
        """Move blocks until no rank is too far above the mean, or no move helps; return the pairs of every rank."""
        stuck: set[int] = set()
        while len(stuck) < self.ranks:
            rank = max((r for r in range(self.ranks) if r not in stuck), key=lambda r: (self.load[r], -r))
            if self.load[rank] <= self.mean * (1 + TOLERANCE):
                break
            move = min(self._moves(rank), default=None)
            if move is None:
                stuck.add(rank)
                continue
            _, pair, target = move
            self._assign(rank, pair, -1)
            self._assign(target, pair, 1)
        return self.owned

    def _moves(self, rank: int) -> Iterator[tuple[float, Pair, int]]:
        """Yield (price per pair taken off, block, new rank) of every move that helps."""
        least = min(range(self.ranks), key=lambda r: (self.load[r], r))
        surplus = self.load[rank] - self.mean
        for pair in self._candidates(rank, surplus):
            area = self.area[pair]
            for target in self._targets(pair, least):
                room = self.mean * (1 + TOLERANCE) - self.load[target]
                taken = min(area, surplus, room)
                if target == rank or taken <= 0 or self.load[target] + area >= self.load[rank]:
                    continue
                # A block that overshoots moves more than it takes off: the same price for less.
                yield (self._price(target, pair, 0) - self._price(rank, pair, 1)) / taken + area / taken, pair, target

    def _candidates(self, rank: int, surplus: float) -> list[Pair]:
        """Return a few blocks of about the surplus or less, the largest first; equal ones with neighbours together."""
        blocks = self.owned[rank]
        first = bisect_left(blocks, -surplus - self.mean * TOLERANCE, key=lambda pair: -self.area[pair])
        return blocks[max(0, min(first, len(blocks) - CANDIDATES)) :][:CANDIDATES]

    def _targets(self, pair: Pair, least: int) -> set[int]:
        targets = {self.owner[pair[0]], self.owner[pair[1]], least}
        for side, chunk in zip(PRICE, pair, strict=True):
            if holders := self.holders[side, chunk]:
                targets.add(min(holders, key=lambda r: (self.load[r], r)))
        return targets

    def _price(self, rank: int, pair: Pair, readers: int) -> float:
        """Return the cost of the remote rows of a block that so many blocks of a rank read.

        With 0 readers these are the transfers that the block adds to a rank, with 1 those that only it needs.
        """
        return sum(
            self.rows[chunk] * PRICE[side]
            for side, chunk in zip(PRICE, pair, strict=True)
            if self.owner[chunk] != rank and self.readers[rank, side, chunk] == readers
        )

    def _assign(self, rank: int, pair: Pair, by: int) -> None:
        """Give a block to a rank (1), or take it away (-1)."""
        self.load[rank] += by * self.area[pair]
        if by > 0:
            insort(self.owned[rank], pair, key=lambda pair: (-self.area[pair], pair))
        else:
            self.owned[rank].remove(pair)
        for side, chunk in zip(PRICE, pair, strict=True):
            self.readers[rank, side, chunk] += by
            holders = self.holders[side, chunk]
            (holders.add if self.readers[rank, side, chunk] else holders.remove)(rank)
