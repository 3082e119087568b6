"""Token layouts: the chunks of the sequence, and the rank that owns each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import Span


@dataclass(frozen=True, slots=True)
class Layout:
    """A disjoint cover of [0, length) by chunks; `owner` holds the owner of each.

    A rank's local sequence is its chunks one after another, in the order of their numbers.
    """

    chunks: tuple[Span, ...]
    owner: tuple[int, ...]
    _held: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held: list[list[int]] = [[] for _ in range(max(self.owner, default=-1) + 1)]
        for chunk, owner in enumerate(self.owner):
            held[owner].append(chunk)
        object.__setattr__(self, "_held", tuple(map(tuple, held)))

    def __hash__(self) -> int:
        return hash((len(self.chunks), self.owner))  # a layout is a key of caches, and may have hundreds of chunks

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self._held)

    @property
    def length(self) -> int:
        """Return the tokens of the whole sequence."""
        return max(chunk.hi for chunk in self.chunks)

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks that a rank owns, in local order."""
        return self._held[rank]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the tokens of a rank as spans of the sequence, in local order."""
        return tuple(self.chunks[chunk] for chunk in self.of(rank))

    def positions(self, rank: int) -> list[int]:
        """Return the global position of each token of a rank, in local order."""
        return [token for span in self.spans(rank) for token in range(span.lo, span.hi)]

    def offsets(self, chunks: tuple[int, ...]) -> dict[int, int]:
        """Return the first row of each of these chunks when they lie one after another."""
        starts = accumulate((len(self.chunks[chunk]) for chunk in chunks), initial=0)
        return dict(zip(chunks, starts, strict=False))


def cut(length: int, parts: int) -> tuple[Span, ...]:
    """Cut [0, length) into `parts` spans whose lengths differ by at most one."""
    edges = [part * length // parts for part in range(parts + 1)]
    return tuple(Span(lo, hi) for lo, hi in pairwise(edges))


def contiguous(length: int, ranks: int) -> Layout:
    """Give rank r the r-th slice, in order."""
    return Layout(cut(length, ranks), tuple(range(ranks)))


def halves(length: int, ranks: int) -> Layout:
    """Give each rank the same tokens as `contiguous`, in two chunks, so that two ranks can share a block."""
    return Layout(cut(length, 2 * ranks), tuple(chunk // 2 for chunk in range(2 * ranks)))


def zigzag(length: int, ranks: int) -> Layout:
    """Give rank r chunks r and 2P-1-r of 2P: equal causal work per rank, but permuted data."""
    return Layout(cut(length, 2 * ranks), tuple(min(chunk, 2 * ranks - 1 - chunk) for chunk in range(2 * ranks)))


def cut_at(layout: Layout, tokens: Iterable[int]) -> Layout:
    """Cut the chunks at these tokens too; every rank holds the same tokens as before."""
    edges = sorted(set(tokens))
    chunks, owners = list[Span](), list[int]()
    for chunk, owner in zip(layout.chunks, layout.owner, strict=True):
        inside = edges[bisect_right(edges, chunk.lo) : bisect_left(edges, chunk.hi)]
        parts = [Span(lo, hi) for lo, hi in pairwise([chunk.lo, *inside, chunk.hi])]
        chunks += parts
        owners += [owner] * len(parts)
    return Layout(tuple(chunks), tuple(owners)) if len(chunks) > len(layout.chunks) else layout


LAYOUTS: dict[str, tuple[Callable[[int, int], Layout], int]] = {
    "contiguous": (contiguous, 1),
    "halves": (halves, 1),
    "zigzag": (zigzag, 2),
}
"""(layout, chunks per rank) by name. The length must be a multiple of chunks times ranks, so that all ranks hold
equally many tokens. In `halves` every rank holds the same tokens as in `contiguous`.
"""


def by_name(name: str, length: int, ranks: int) -> Layout:
    """Return the layout of that name, among those that depend on the length only.

    Raises:
        UnsupportedError: no such layout, or a length that does not divide among the ranks.
    """
    if name not in LAYOUTS:
        raise UnsupportedError(f"layout {name!r}", "there is no such layout", "one of " + ", ".join(LAYOUTS))
    make, per_rank = LAYOUTS[name]
    chunks = per_rank * ranks
    if length <= 0 or length % chunks:
        up = max(1, -(-length // chunks)) * chunks
        raise UnsupportedError(
            f"a sequence of {length} tokens in layout {name!r} on {ranks} ranks",
            f"the length must be a positive multiple of {chunks}",
            f"for example {up} tokens",
        )
    return make(length, ranks)
