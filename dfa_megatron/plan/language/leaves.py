"""The order of a reduce as a value: a grid of chunks for each document, and a binary tree over the chunks.

The pairs of a query chunk and a key chunk are a *leaf*. Leaves of a key of the reduce merge along dyadic intervals of
the other side's numbers, so the order follows from the mask alone: neither ranks nor time have a part in it.

    a document of 5 chunks, its last row of leaves:      0   1   2   3   4
                                                          \\ /     \\ /    |
                                                          0-1     2-3    |      whoever has 0, 1, 2 sends 0-1 and 2
                                                             \\   /       |
                                                              0-3 ------ 4
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.mask import Mask

Keys = tuple[int, ...]
"""Leaves of one row of a result, in order: `Grid.key` of each."""

_TILES = 20
"""Bits for the number of a tile inside a leaf; a leaf has one, but for masks of several tiles."""


@dataclass(frozen=True, slots=True)
class LeafSizes:
    """The tokens of a chunk, by the tokens of its document.

    least: for short documents. usual: for documents of eight chunks and more. Beyond sixteen of these a chunk grows, so
    that launches and messages stay few.
    """

    least: int
    usual: int

    def of(self, tokens: int) -> int:
        """Return the tokens of a chunk, a power of two: at most a quarter or so of what a long document has."""
        eighth, sixteenth = (1 << max(0, tokens // parts).bit_length() >> 1 for parts in (8, 16))
        return max(sixteenth, min(eighth, self.usual), self.least)


class Grid(NamedTuple):
    """The chunks of a sequence, in order, and the number of each among those that it may see.

    Numbers start at 0 in every document.
    """

    chunks: tuple[Span, ...]
    numbers: tuple[int, ...]

    def at(self, token: int) -> int:
        """Return the index of the chunk that holds a token."""
        return bisect_right(self.chunks, token, key=lambda chunk: chunk.lo) - 1

    def key(self, chunk: int, tile: int = 0) -> int:
        """Return the place in the order of a leaf whose other side is this chunk; tile: its number in the leaf."""
        return self.numbers[chunk] << _TILES | tile


def grid_of(mask: Mask, sizes: LeafSizes) -> Grid:
    """Cut every document into chunks from its first token; tokens that attend to nothing are chunks by themselves.

    A document is a run of tokens that tiles hold together, of queries or of keys. It has the same chunks in any pack.
    A last chunk of less than half the size belongs to the one before, because each takes launches of its own.
    """
    edges = sorted({(span.lo, span.hi) for tile in mask.tiles for span in (tile.q, tile.kv)})
    runs: list[Span] = []
    for lo, hi in edges:
        if runs and lo < runs[-1].hi:
            runs[-1] = Span(runs[-1].lo, max(hi, runs[-1].hi))
        else:
            runs.append(Span(lo, hi))
    home = [*range(len(runs))]  # the first run of those that attend to one another
    starts = [run.lo for run in runs]
    for tile in mask.tiles:
        one, other = sorted(_first(home, bisect_right(starts, span.lo) - 1) for span in (tile.q, tile.kv))
        home[other] = one
    chunks, numbers, counts, end = list[Span](), list[int](), [0] * len(runs), 0
    for number, run in enumerate((*runs, Span(mask.length, mask.length))):
        if run.lo > end:
            gaps = _apart(end, run.lo, mask.length if mask.queries is None else mask.queries)
            chunks, numbers = [*chunks, *gaps], [*numbers, *(0 for _ in gaps)]
        end = run.hi
        size, first = sizes.of(len(run)), 0 if number == len(runs) else _first(home, number)
        cuts = [*range(run.lo, run.hi, size)]
        if len(cuts) > 1 and 2 * (run.hi - cuts[-1]) < size:
            cuts.pop()
        for lo, hi in pairwise((*cuts, run.hi)):
            chunks.append(Span(lo, hi))
            numbers.append(counts[first])
            counts[first] += 1
    return Grid(tuple(chunks), tuple(numbers))


def _first(home: list[int], run: int) -> int:
    while home[run] != run:
        run = home[run]
    return run


def _apart(lo: int, hi: int, queries: int) -> list[Span]:
    """Return the positions lo..hi, cut where queries end and keys begin."""
    return [Span(a, b) for a, b in ((lo, min(hi, queries)), (max(lo, queries), hi)) if a < b]


def halves(keys: Keys) -> tuple[Keys, Keys]:
    """Return the two nodes below that of several leaves: they differ in the highest bit in which any two differ."""
    bit = 1 << (keys[0] ^ keys[-1]).bit_length() - 1
    at = next(place for place, key in enumerate(keys) if key & bit)
    return keys[:at], keys[at:]


def subtrees(some: Keys, every: Keys) -> list[Keys]:
    """Return the largest nodes that leaves make together, among all leaves of a row; both in order."""
    if len(some) == len(every) or not some:
        return [some] if some else []
    first, second = halves(every)
    at = next((place for place, key in enumerate(some) if key >= second[0]), len(some))
    return [*subtrees(some[:at], first), *subtrees(some[at:], second)]


def is_node(first: Sequence[int], second: Sequence[int], every: Sequence[int]) -> bool:
    """Return whether two sets of leaves are the halves of a node of the tree over every leaf, in this order."""
    if not first or not second:
        return False
    low, high = min(*first, *second), max(*first, *second)
    level = (low ^ high).bit_length()
    inside = {key for key in every if key >> level == low >> level}
    bits = {key >> (level - 1) & 1 for key in first}, {key >> (level - 1) & 1 for key in second}
    return bits == ({0}, {1}) and inside == {*first, *second}
