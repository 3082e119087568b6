"""Split a mask into components: runs of tokens that attend only to one another, such as the documents of a pack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.mask import Mask, kept_on_mask


class Component(NamedTuple):
    """Tokens that attend only to one another: their span, the tiles in it, and `work`, the number of pairs.

    is_document: True if it is one causal tile over the whole span, the usual case.
    """

    span: Span
    tiles: tuple[Tile, ...]
    work: int
    is_document: bool = False

    def row_work(self, edges: Sequence[int]) -> list[int]:
        """Return the number of pairs in the rows between each edge and the next."""
        if self.is_document:
            first = 1 - 2 * self.span.lo
            return [(hi - lo) * (lo + hi + first) // 2 for lo, hi in pairwise(edges)]
        work = [0] * (len(edges) - 1)
        for tile in self.tiles:
            for at in range(max(0, bisect_right(edges, tile.q.lo) - 1), len(work)):
                if edges[at] >= tile.q.hi:
                    break
                part = tile.restrict(Span(edges[at], edges[at + 1]), tile.kv)
                work[at] += part.area if part else 0
        return work


@kept_on_mask
def components(mask: Mask) -> tuple[Component, ...]:
    """Return the components of a mask in order. Tokens that nothing attends to form components without work."""
    found: list[Component] = []
    lo = hi = 0
    inside: list[Tile] = []
    ends = sorted([(min(t.q.lo, t.kv.lo), max(t.q.hi, t.kv.hi), t) for t in mask.tiles], key=lambda end: end[0])
    for first, end, tile in ends:
        if first >= hi:
            if hi > lo:
                found.append(_component(lo, hi, inside))
            if first > hi:
                found.append(Component(Span(hi, first), (), 0))
            lo, hi, inside = first, end, []
        hi = max(hi, end)
        inside.append(tile)
    if hi > lo:
        found.append(_component(lo, hi, inside))
    if hi < mask.length:
        found.append(Component(Span(hi, mask.length), (), 0))
    return tuple(found)


def _component(lo: int, hi: int, tiles: list[Tile]) -> Component:
    if len(tiles) == 1:
        only, rows = tiles[0], hi - lo
        if only.hi == 0 and only.lo == -UNBOUNDED and only.q == only.kv:
            return Component(only.q, (only,), rows * (rows + 1) // 2, True)
    return Component(Span(lo, hi), tuple(tiles), sum(tile.area for tile in tiles))
