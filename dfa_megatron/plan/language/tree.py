"""Forests of segments that share their prefixes, and their masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import index

from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.mask import Mask, short_name


@dataclass(frozen=True, slots=True)
class Tree:
    """Segments of a sequence, each behind its parent's path; documents are segments without parents.

    They stand in depth-first order: a segment, its first child with all descendants, the next child.

    Args:
        lengths: tokens of each segment.
        parents: the index of each segment's parent, -1 for a root.

    Raises:
        ValueError: they are no trees in this order; names the segment, and the parents that it can have.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) <= 0:
            raise ValueError(f"lengths of segments must be positive, got {list(self.lengths)}")
        if len(self.parents) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} segments need as many parents, got {list(self.parents)}")
        for at, parent in enumerate(self.parents):
            above = at - 1
            while above not in (parent, -1):
                above = self.parents[above]
            if above != parent:
                known = "-1" + f", {at - 1} or an ancestor of {at - 1}" * (at > 0)
                raise ValueError(f"in depth-first order the parent of segment {at} is {known}, got {parent}")

    @classmethod
    def of(cls, given: Tree | Sequence[Sequence[int]]) -> Tree:
        """Return the tree that a batch tells: one, or lengths and parents as rows of any numbers.

        Raises:
            ValueError: they are no such rows, or no trees.
        """
        if isinstance(given, Tree):
            return given
        try:
            lengths, parents = (tuple(int(number) for number in numbers) for numbers in given)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return cls(lengths, parents)

    @property
    def length(self) -> int:
        """Return the tokens of the sequence."""
        return sum(self.lengths)

    @property
    def spans(self) -> list[Span]:
        """Return the tokens of each segment."""
        return [Span(lo, hi) for lo, hi in pairwise(accumulate(self.lengths, initial=0))]

    @property
    def places(self) -> list[int]:
        """Return the place of each segment's first token in its path."""
        places: list[int] = []
        for parent in self.parents:
            places.append(places[parent] + self.lengths[parent] if parent >= 0 else 0)
        return places

    @property
    def longest(self) -> int:
        """Return the tokens of the longest path."""
        return max(place + length for place, length in zip(self.places, self.lengths, strict=True))

    def mask(self, window: int = -1) -> Mask:
        """Return the pairs that attend, the same object each time; `window` as for `prompt_tree`."""
        return _mask(self, window if window < self.longest - 1 else -1)


def prompt_tree(lengths: Sequence[int], parents: Sequence[int], *, window: int = -1) -> Mask:
    """Return trees of segments that share their prefixes: a token sees its segment's ancestors, and j <= i inside it.

    Args:
        lengths: tokens of each segment. They stand in depth-first order, each tree behind the one before.
        parents: the index of each segment's parent, -1 for a root.
        window: a token sees only this many tokens before it, counted along its path; -1 means no bound.
    """
    return Tree(tuple(map(index, lengths)), tuple(map(index, parents))).mask(index(window))


@lru_cache(maxsize=64)
def _mask(tree: Tree, window: int) -> Mask:
    """Make the tiles: a run of first children is one causal tile.

    The other children of a segment share one tile, of the columns of that run; with a window each has its own.
    """
    if window < -1:
        raise ValueError(f"a window is -1 (no bound) or at least 0, got {window}")
    spans, runs = tree.spans, _runs(tree)
    name = f"prompt tree({short_name(tree.parents)};{short_name(tree.lengths)}{f';{window}' if window >= 0 else ''})"
    tiles = [Tile(run, run, -window if window >= 0 else -UNBOUNDED, 0) for run in dict.fromkeys(runs)]
    begins = {run.lo: at for at, run in reversed([*enumerate(runs)])}
    if window < 0:
        ends, others = [span.hi for span in spans], dict[int, int]()
        for at in reversed(range(len(spans))):
            if (parent := tree.parents[at]) >= 0:
                ends[parent] = max(ends[parent], ends[at])
        for run in dict.fromkeys(runs):
            if (parent := tree.parents[begins[run.lo]]) >= 0:
                others.setdefault(parent, run.lo)
        tiles += [Tile(Span(lo, ends[at]), Span(runs[at].lo, spans[at].hi)) for at, lo in others.items()]
    else:
        places = tree.places
        for run in dict.fromkeys(runs):
            first = begins[run.lo]
            above = tree.parents[first]
            while above >= 0:
                over = runs[above]
                shift = (places[first] - run.lo) - (places[begins[over.lo]] - over.lo)
                tiles.append(Tile(run, Span(over.lo, spans[above].hi), shift - window))
                above = tree.parents[begins[over.lo]]
    return Mask(name, tree.length, tuple(shrunk for tile in tiles if (shrunk := tile.shrink())))


def _runs(tree: Tree) -> list[Span]:
    """Return for each segment the tokens of the run of first children that it is in."""
    begins, ends, spans = list[int](), dict[int, int](), tree.spans
    for at, (span, parent) in enumerate(zip(spans, tree.parents, strict=True)):
        begins.append(begins[parent] if 0 <= parent == at - 1 else span.lo)
        ends[begins[at]] = span.hi
    return [Span(lo, ends[lo]) for lo in begins]
