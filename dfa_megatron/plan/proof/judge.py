"""Judge the merges of a reduce whose order is fixed: each one must make a node of the tree over the mask's leaves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.leaves import Grid, is_node

Terms = Sequence[tuple[int, Tile]]
"""Pairs of some rows of a buffer: the token of a row is the row plus this number."""


class Judge:
    """The leaves that the mask has in every row of a side."""

    def __init__(self, plan: Plan, side: str, grid: Grid) -> None:
        self.grid, self.by_q = grid, side == "q"
        self.leaves: dict[int, list[tuple[Span, int, Tile]]] = defaultdict(list)
        for (q, kv), tiles in plan.pairs.items():
            mine, other = (q, kv) if self.by_q else (kv, q)
            for number, tile in enumerate(tiles):
                self.leaves[mine].append((tile.q if self.by_q else tile.kv, self.grid.key(other, number), tile))

    def check(self, parts: Sequence[Terms], rows: Span) -> None:
        """Raise a LookupError for parts, in their order, that are not the two halves of a node in every row."""
        if len(parts) != 2:
            raise LookupError(f"{len(parts)} partials are merged at once where two make a node")
        tokens = [sorted(self._tokens(part, rows)) for part in parts]
        edges = sorted({edge for span, _ in (*tokens[0], *tokens[1]) for edge in (span.lo, span.hi)})
        edges = sorted({*edges, *(edge for at in edges for span, *_ in self._near(at) for edge in (span.lo, span.hi))})
        for lo, hi in pairwise(edges):
            every = [key for span, key, _ in self._near(lo) if span.lo <= lo and hi <= span.hi]
            first, second = ([key for span, key in part if span.lo <= lo and hi <= span.hi] for part in tokens)
            if (first or second) and not is_node(first, second, every):
                raise LookupError(f"tokens {lo} to {hi}: leaves {first} and {second} are no two halves of a node")

    def whole(self, tiles: Sequence[Tile]) -> bool:
        """Return whether these tiles of queries make whole leaves, which a kernel may have cut."""
        areas = Counter[Tile]()
        for tile in tiles:
            leaf = next((leaf for _, _, leaf in self._near(tile.q.lo) if leaf.holds(tile)), None)
            if leaf is None:
                return False
            areas[leaf] += tile.area
        return all(leaf.area == area for leaf, area in areas.items())

    def _near(self, token: int) -> list[tuple[Span, int, Tile]]:
        return self.leaves[self.grid.at(token)]

    def _tokens(self, terms: Terms, rows: Span) -> list[tuple[Span, int]]:
        """Return the tokens of the rows for which each term is there, and its key."""
        found = []
        for shift, tile in terms:
            own = (tile.q if self.by_q else tile.kv) & rows.shift(shift)
            key = next((key for _, key, leaf in self._near(own.lo) if leaf.holds(tile)), -1)
            found.append((own, key))
        return found
