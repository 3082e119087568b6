"""A rank's share of a sequence: which segments' ends other ranks need, so which states and tokens have to travel.

Segments are cut at the ends of ranks into pieces. What comes into a piece is the state at the end of the piece before
it on its path: of the same segment on the rank before, or the last of its segment's parent. Documents have no parents.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.cu_seqlens import Offsets, check_offsets

Parents = tuple[int, ...]
"""The number of every segment's parent, -1 for a root; () where all are roots."""


class Reach(NamedTuple):
    """The tokens before the pieces of this rank, for a convolution.

    brings: for every rank, the tokens of others that it needs.
    own: the places in this rank of its own tokens that are needed.
    rows: for each of `leads`, `count` rows of [a zero, own, brought].
    documents: the offsets of the pieces with these rows before them.
    """

    brings: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    rows: tuple[int, ...]
    documents: Offsets


@dataclass(frozen=True)
class Share:
    """The contiguous tokens of one rank. A rank without tokens has no piece.

    edges: global starts of the ranks' tokens and the length of all.
    offsets: global starts of the segments and the length of all; () for a sequence that is one document.
    """

    rank: int
    edges: Offsets
    offsets: Offsets = ()
    parents: Parents = ()

    def __post_init__(self) -> None:
        """Refuse offsets that do not fit the tokens of all ranks, and parents that do not fit the offsets."""
        if self.offsets:  # segments may have no token
            some = (*self.offsets[:1], *(hi for lo, hi in pairwise(self.offsets) if hi != lo))
            check_offsets(some if some[1:] else self.offsets, self.edges[-1])
        if not self.parents:
            return
        try:
            Tree(tuple(max(hi - lo, 1) for lo, hi in pairwise(self.offsets)), self.parents)
        except ValueError as error:
            raise UnsupportedError("parents", str(error), "the parents of a prompt tree beside cu_seqlens") from error

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.edges) - 1

    @property
    def tokens(self) -> int:
        """The tokens of this rank."""
        return self.edges[self.rank + 1] - self.edges[self.rank]

    @property
    def held(self) -> str:
        """The tokens of every rank, one number where they are equal."""
        counts = [hi - lo for lo, hi in pairwise(self.edges)]
        return str(counts[0]) if len({*counts}) == 1 else ", ".join(map(str, counts))

    @cached_property
    def _cut(self) -> tuple[list[int], list[int], list[int]]:
        """The end of every piece, the piece before it or -1, and the first piece of each rank and the number of all."""
        ends, before, last = list[int](), list[int](), list[int]()
        for at, (lo, hi) in enumerate(pairwise(self.offsets or (0, self.edges[-1]))):
            parent = self.parents[at] if self.parents else -1
            comes = last[parent] if parent >= 0 else -1
            inside = self.edges[bisect_right(self.edges, lo) : bisect_left(self.edges, hi)]
            for end in sorted({*inside, hi} - {lo}):
                before.append(comes)
                comes = len(ends)
                ends.append(end)
            last.append(comes)
        return ends, before, [bisect_right(ends, edge) for edge in self.edges]

    @property
    def before(self) -> list[int]:
        """The number of the piece whose final state comes into each piece of the sequence; -1 for none."""
        return self._cut[1]

    def of(self, rank: int) -> range:
        """Return the numbers of a rank's pieces."""
        return range(*self._cut[2][rank : rank + 2])

    @cached_property
    def mine(self) -> range:
        """The numbers of this rank's pieces."""
        return self.of(self.rank)

    @cached_property
    def pieces(self) -> Offsets:
        """The local offsets of this rank's pieces."""
        return (0, *(self._cut[0][piece] - self.edges[self.rank] for piece in self.mine))

    @cached_property
    def led(self) -> tuple[int, ...]:
        """This rank's pieces that a state comes into."""
        return tuple(piece for piece in self.mine if self.before[piece] >= 0)

    @cached_property
    def followed(self) -> frozenset[int]:
        """This rank's pieces whose final states are read, and its last."""
        return frozenset(piece for piece in self.before if piece in self.mine) | {*self.mine[-1:]}

    @property
    def last(self) -> int:
        """The last piece up to the end of this rank: its own, or where it has no tokens an earlier rank's; or -1."""
        return self.mine.stop - 1

    @cached_property
    def source(self) -> list[int]:
        """For each piece, that of an earlier rank whose final state its own depends on first, or -1."""
        found = list[int]()
        for rank in range(self.ranks):
            mine = self.of(rank)
            for piece in mine:
                before = self.before[piece]
                found.append(found[before] if before in mine else before)
        return found

    @cached_property
    def brought(self) -> list[list[int]]:
        """The pieces of other ranks whose final states come into each rank; into one without tokens the last."""
        found = []
        for mine in map(self.of, range(self.ranks)):
            before = {self.before[piece] for piece in mine} if mine else {mine.stop - 1}
            found.append(sorted(piece for piece in before if 0 <= piece < mine.start))
        return found

    @cached_property
    def sent(self) -> list[list[int]]:
        """The pieces of each rank whose final states go to others."""
        away = {piece for pieces in self.brought for piece in pieces}
        return [[piece for piece in self.of(rank) if piece in away] for rank in range(self.ranks)]

    @cached_property
    def crosses(self) -> bool:
        """Whether any path has tokens on two ranks; otherwise nothing has to travel."""
        return any(self.brought)

    @cached_property
    def chains(self) -> bool:
        """Whether a state goes through a whole rank; otherwise no M has to travel."""
        return any(self.source[piece] >= 0 for pieces in self.sent for piece in pieces)

    @cached_property
    def runs(self) -> list[range]:
        """This rank's pieces: each that is led by itself, and the others between them together."""
        return self._runs({*self.led, *(piece + 1 for piece in self.led)})

    @cached_property
    def leads(self) -> list[range]:
        """This rank's pieces, cut before each that is led: a convolution gets tokens before the first of each."""
        return self._runs({*self.led})

    def _runs(self, cuts: set[int]) -> list[range]:
        return [range(lo, hi) for lo, hi in pairwise(sorted({self.mine.start, *cuts, self.mine.stop}))]

    def span(self, run: range) -> tuple[int, int]:
        """Return the tokens of some of this rank's pieces that lie next to each other."""
        return self.pieces[run[0] - self.mine[0]], self.pieces[run[-1] - self.mine[0] + 1]

    def lengths(self, runs: Iterable[range]) -> list[int]:
        """Return how many tokens each of these has."""
        return [hi - lo for lo, hi in map(self.span, runs)]

    def calls(self, pieces: range, *, packs: bool, one_state: bool) -> list[range]:
        """Return these pieces by calls of a kernel.

        packs: whether a call takes several. one_state: whether it returns the state of the last alone.
        """
        if not packs:
            return [range(piece, piece + 1) for piece in pieces]
        cuts = {piece + 1 for piece in self.followed if one_state and piece in pieces}
        return [range(lo, hi) for lo, hi in pairwise(sorted({pieces.start, *cuts, pieces.stop}))]

    def reach(self, count: int) -> Reach:
        """Return where the `count` tokens before this rank's pieces are."""
        if count not in self._reaches:
            needed = [
                {token for piece in self.of(rank) for token in self._behind(piece, count)} for rank in range(self.ranks)
            ]
            held = [range(*edges) for edges in pairwise(self.edges)]
            brings = tuple(tuple(sorted(needed[rank].difference(held[rank]))) for rank in range(self.ranks))
            own = sorted(needed[self.rank].intersection(held[self.rank]))
            row = {token: at for at, token in enumerate((*own, *brings[self.rank]), start=1)}
            rows = list[int]()
            for run in self.leads:
                behind = [row[token] for token in self._behind(run[0], count)]
                rows += [0] * (count - len(behind)) + behind[::-1]
            local = tuple(token - self.edges[self.rank] for token in own)
            begins = [sum(lead[0] < piece for lead in self.leads) for piece in (*self.mine, len(self.before))]
            documents = tuple(offset + count * added for offset, added in zip(self.pieces, begins, strict=True))
            self._reaches[count] = Reach(brings, local, tuple(rows), documents)
        return self._reaches[count]

    @cached_property
    def _reaches(self) -> dict[int, Reach]:
        return {}

    def _behind(self, piece: int, count: int) -> list[int]:
        """Return the tokens before a piece on its path, the nearest first, `count` at most."""
        ends, before, _ = self._cut
        found = list[int]()
        while (piece := before[piece]) >= 0 and len(found) < count:
            start = ends[piece - 1] if piece else 0
            found += range(ends[piece] - 1, max(start, ends[piece] - count + len(found)) - 1, -1)
        return found


def edges_of(layout: Layout | str, tokens: int, ranks: int, offsets: Offsets = ()) -> Offsets:
    """Return the starts of the ranks' tokens and the length of all.

    A name means the length of the offsets; without them as many tokens on every rank as there are here.

    Raises:
        UnsupportedError: the ranks do not hold contiguous tokens in their order.
    """
    if isinstance(layout, str):
        held = layout == "contiguous"
        layout = contiguous(max(offsets[-1], 0) if offsets else tokens * ranks, ranks)
    else:
        spans = [span for rank in range(layout.ranks) for span in layout.spans(rank)]
        together = [span.lo for span in spans] == [0, *(span.hi for span in spans)][: len(spans)]
        held = together and (layout.ranks, layout.queries) == (ranks, None)
    if not held:
        raise UnsupportedError(
            "the layout of a recurrence or a convolution",
            "states pass from token to token, so each rank holds contiguous tokens, in rank order",
            "'contiguous', or layouts.of_lengths([...]), the tokens of every rank",
        )
    return tuple(accumulate(map(layout.tokens, range(ranks)), initial=0))
