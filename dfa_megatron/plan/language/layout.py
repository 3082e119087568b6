"""Token layouts: the chunks of the sequence, and the rank that owns each.

Ranks may hold numbers of tokens that differ, also none. Queries and keys of two sequences have one layout together, the
keys behind the queries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import index
from zlib import crc32

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import Span, joined_spans


@dataclass(frozen=True)
class Layout:
    """A disjoint cover of [0, length) by chunks; `owner` holds the owner of each.

    A rank's local sequence is its chunks one after another, in the order of their numbers.

    ranks: their number, where the last ones own no chunk.
    queries: None where a token is a query and a key. Else positions below this are those of queries, and key j is at
        position queries + j.
    """

    chunks: tuple[Span, ...]
    owner: tuple[int, ...]
    ranks: int = 0
    queries: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", max(self.ranks, max(self.owner, default=-1) + 1))

    @cached_property  # no field of the dataclass: torch copies those of a module's keywords by `dataclasses.replace`
    def _held(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for chunk, owner in enumerate(self.owner):
            held[owner].append(chunk)
        return tuple(map(tuple, held))

    def __hash__(self) -> int:
        return hash((len(self.chunks), self.owner))  # a layout is a key of caches, and may have hundreds of chunks

    def __str__(self) -> str:
        """Say which tokens each rank holds: layouts of equal text are equal, however their chunks are cut."""
        if self.queries is not None:
            return f"queries {self.side('q')}, keys {self.side('kv')}"
        held = ",".join(str(self.tokens(rank)) for rank in range(self.ranks))
        spans = [joined_spans(self.spans(rank)) for rank in range(self.ranks)]
        if self.in_order and all(len(joined) < 2 for joined in spans):
            return f"contiguous of {held} tokens"
        return f"chunks of {held} tokens #{crc32(repr(spans).encode()):08x}"

    @property
    def length(self) -> int:
        """Return the tokens of the whole sequence, or of both."""
        return max((chunk.hi for chunk in self.chunks), default=0)

    @property
    def in_order(self) -> bool:
        """Return whether every rank's tokens precede those of the next, of queries and of keys."""
        return self.falls <= {self.queries}

    @property
    def falls(self) -> set[int]:
        """Return the first tokens of chunks behind one of a later rank."""
        return {chunk.lo for (_, before), (chunk, owner) in pairwise(sorted(self._owned())) if owner < before}

    def _owned(self) -> Iterable[tuple[Span, int]]:
        return zip(self.chunks, self.owner, strict=True)

    def of(self, rank: int, side: str = "") -> tuple[int, ...]:
        """Return the chunks that a rank owns, in local order: all, or those of its queries "q" or keys "kv"."""
        held, queries = self._held[rank], self.queries
        if queries is None or not side:
            return held
        return tuple(chunk for chunk in held if (self.chunks[chunk].lo < queries) == (side == "q"))

    def rows(self, rank: int) -> dict[int, int]:
        """Return the first row of each chunk of a rank in its tensors: q's, or k's and v's."""
        if self.queries is None:
            return self.offsets(self.of(rank))
        return self.offsets(self.of(rank, "q")) | self.offsets(self.of(rank, "kv"))

    def tokens(self, rank: int, side: str = "q") -> int:
        """Return the number of tokens that a rank holds: queries "q", or keys "kv"."""
        return sum(len(self.chunks[chunk]) for chunk in self.of(rank, side))

    def spans(self, rank: int, side: str = "") -> tuple[Span, ...]:
        """Return the tokens of a rank as spans of the sequence, in local order."""
        return tuple(self.chunks[chunk] for chunk in self.of(rank, side))

    def positions(self, rank: int) -> list[int]:
        """Return the global position of each token of a rank, in local order."""
        return [token for span in self.spans(rank) for token in range(span.lo, span.hi)]

    def offsets(self, chunks: tuple[int, ...]) -> dict[int, int]:
        """Return the first row of each of these chunks when they lie one after another."""
        starts = accumulate((len(self.chunks[chunk]) for chunk in chunks), initial=0)
        return dict(zip(chunks, starts, strict=False))

    def check_tokens(self, rank: int, held: int, side: str = "") -> None:
        """Refuse tensors of a rank that do not hold its tokens: queries "q", keys "kv", or those of one sequence."""
        if (wanted := self.tokens(rank, side)) != held:
            name = {"q": "queries", "kv": "keys"}.get(side, "tokens")
            what, why = f"{held} {name} on rank {rank}", f"its layout has {wanted} there: {self}"
            raise UnsupportedError(what, why, "q, k and v cut by shard_sequence with it, and masks of whole sequences")

    def side(self, side: str) -> Layout:
        """Return the layout of the queries "q" or of the keys "kv" alone, each from position 0."""
        if self.queries is None:
            return self
        by = 0 if side == "q" else self.queries
        mine = [(chunk.shift(-by), rank) for chunk, rank in self._owned() if (chunk.lo < self.queries) == (side == "q")]
        return Layout(tuple(chunk for chunk, _ in mine), tuple(rank for _, rank in mine), self.ranks)

    def owner_of(self, token: int) -> int:
        """Return the rank that holds a token, where chunks are in the order of their tokens."""
        return self.owner[bisect_right(self.chunks, token, key=lambda chunk: chunk.lo) - 1]

    def joined(self) -> Layout:
        """Return the layout in as few chunks as hold the same tokens, in the order of the sequence."""
        found: list[tuple[Span, int]] = []
        for chunk, owner in sorted(self._owned()):
            if found and found[-1][1] == owner and chunk.lo != self.queries:
                chunk = Span(found.pop()[0].lo, chunk.hi)
            found.append((chunk, owner))
        return Layout(tuple(c for c, _ in found), tuple(owner for _, owner in found), self.ranks, self.queries)

    def merged(self, neighbours: int) -> Layout:
        """Return the layout of ranks that each hold the tokens of so many neighbours."""
        return replace(self, owner=tuple(rank // neighbours for rank in self.owner), ranks=self.ranks // neighbours)

    def halved(self) -> Layout:
        """Cut each chunk in two, so that two ranks can share a block."""
        return cut_at(self, [(chunk.lo + chunk.hi) // 2 for chunk in self.chunks])


def cut(length: int, parts: int) -> tuple[Span, ...]:
    """Cut [0, length) into `parts` spans; the first ones are one longer where it does not divide."""
    length, parts = index(length), index(parts)
    if length < 0 or parts < 1:
        raise UnsupportedError(f"{length} tokens in {parts} parts", "there are too few", "0 or more, in 1 or more")
    each, more = divmod(length, parts)
    return tuple(Span(lo, hi) for lo, hi in pairwise(part * each + min(part, more) for part in range(parts + 1)))


def contiguous(length: int, ranks: int) -> Layout:
    """Give rank r the r-th slice, in order; the first ranks hold one token more where the length does not divide."""
    return _of(cut(length, ranks), range(ranks))


def zigzag(length: int, ranks: int) -> Layout:
    """Give rank r chunks r and 2P-1-r of 2P: equal causal work per rank, but permuted data."""
    ranks = index(ranks)
    return _of(cut(length, 2 * ranks), [min(chunk, 2 * ranks - 1 - chunk) for chunk in range(2 * ranks)])


def of_lengths(lengths: Sequence[int]) -> Layout:
    """Give rank r the next lengths[r] tokens, in order; some may be 0."""
    counts = [*map(index, lengths)]
    if min(counts, default=0) < 0:
        raise UnsupportedError(f"lengths {counts}", "they are numbers of tokens", "0 or more for each rank")
    return _of([Span(lo, hi) for lo, hi in pairwise(accumulate(counts, initial=0))], range(len(counts)))


def zigzag_documents(cu_seqlens: Sequence[int], ranks: int) -> Layout:
    """Cut each document of a pack zigzag by itself, as Transformer Engine and ring-flash-attn place packed data."""
    ends = [*map(index, cu_seqlens)]
    if ends[:1] != [0]:
        raise UnsupportedError(f"cu_seqlens {ends}", "the first document starts at 0", "(0, end, ...)")
    order = zigzag(2 * ranks, ranks).owner
    chunks, owners = list[Span](), list[int]()
    for lo, hi in pairwise(ends):
        chunks += [chunk.shift(lo) for chunk in cut(hi - lo, 2 * ranks)]
        owners += order
    return _of(chunks, owners)


def cross(queries: Layout, keys: Layout) -> Layout:
    """Return the layout of queries that attend to keys of another sequence, over the same ranks."""
    if queries.ranks != keys.ranks:
        why = "both sequences are sharded over the ranks of one group"
        raise UnsupportedError(f"queries on {queries.ranks} ranks, keys on {keys.ranks}", why, "layouts of equal ranks")
    by = queries.length
    chunks = (*queries.chunks, *(chunk.shift(by) for chunk in keys.chunks))
    return Layout(chunks, (*queries.owner, *keys.owner), queries.ranks, by)


def of_rows(rows: Sequence[Layout]) -> Layout:
    """Return the layout of the rows of a batch as one sequence, one behind another: a rank holds its part of each."""
    if rows[0].queries is not None:
        return cross(of_rows([row.side("q") for row in rows]), of_rows([row.side("kv") for row in rows]))
    starts = accumulate((row.length for row in rows), initial=0)
    chunks = [chunk.shift(by) for row, by in zip(rows, starts, strict=False) for chunk in row.chunks]
    return Layout(tuple(chunks), tuple(owner for row in rows for owner in row.owner), rows[0].ranks)


def _of(chunks: Iterable[Span], owner: Iterable[int]) -> Layout:
    """Return the layout of these chunks but for empty ones."""
    given = [*zip(chunks, owner, strict=True)]
    kept = [(chunk, rank) for chunk, rank in given if len(chunk)]
    return Layout(tuple(c for c, _ in kept), tuple(r for _, r in kept), 1 + max((r for _, r in given), default=-1))


def cut_at(layout: Layout, tokens: Iterable[int]) -> Layout:
    """Cut the chunks at these tokens too; every rank holds the same tokens as before."""
    edges = sorted(set(tokens))
    chunks, owners = list[Span](), list[int]()
    for chunk, owner in zip(layout.chunks, layout.owner, strict=True):
        inside = edges[bisect_right(edges, chunk.lo) : bisect_left(edges, chunk.hi)]
        chunks += [Span(lo, hi) for lo, hi in pairwise([chunk.lo, *inside, chunk.hi])]
        owners += [owner] * (len(inside) + 1)
    more = Layout(tuple(chunks), tuple(owners), layout.ranks, layout.queries)
    return more if len(chunks) > len(layout.chunks) else layout


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {"contiguous": contiguous, "zigzag": zigzag}
"""The layouts that depend on the length only, by name."""


def by_name(name: str, length: int, ranks: int) -> Layout:
    """Return the layout of that name, among those that depend on the length only, or refuse the name."""
    if name not in LAYOUTS:
        instead = f"{', '.join(LAYOUTS)}, or load_balanced with cu_seqlens"
        raise UnsupportedError(f"layout {name!r}", "it does not follow from the length", instead)
    if not length:
        instead = "more; layouts.contiguous(all tokens, ranks) for layout, where other ranks hold some"
        raise UnsupportedError(f"a sequence of {length} tokens on {ranks} ranks", "there is nothing to share", instead)
    return LAYOUTS[name](length, ranks)
