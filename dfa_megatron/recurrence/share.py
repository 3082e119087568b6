"""A rank's share of a sequence: which documents cross ranks, so which states and tokens have to travel."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from dfa_megatron.runtime.cu_seqlens import Offsets, check_offsets


@dataclass(frozen=True)
class Share:
    """The contiguous tokens of one rank: `tokens` on each of `ranks` ranks.

    offsets: global starts of the documents and the length of all; () for a sequence that is one document.
    """

    rank: int
    ranks: int
    tokens: int
    offsets: Offsets = ()

    def __post_init__(self) -> None:
        """Refuse offsets that do not fit the tokens of all ranks."""
        if self.offsets:
            check_offsets(self.offsets, self.tokens * self.ranks)

    def continues(self, rank: int) -> bool:
        """Return whether the first token of a rank belongs to a document that an earlier rank began."""
        return self.seen(rank, 1) > 0

    def keeps(self, rank: int) -> bool:
        """Return whether no document starts inside a rank's tokens; a start at the first of them counts not."""
        return len(self.pieces_of(rank)) == 2

    def seen(self, rank: int, most: int) -> int:
        """Return how many tokens before a rank's first one belong to its document, `most` at most."""
        at = rank * self.tokens
        start = self.offsets[bisect_right(self.offsets, at, 0, len(self.offsets) - 1) - 1] if self.offsets else 0
        return min(most, at - start)

    def pieces_of(self, rank: int) -> Offsets:
        """Return 0, the document starts inside a rank's tokens, and their number: local offsets."""
        lo, hi = rank * self.tokens, (rank + 1) * self.tokens
        inside = self.offsets[bisect_right(self.offsets, lo) : bisect_left(self.offsets, hi)]
        return (0, *(offset - lo for offset in inside), self.tokens)

    @cached_property
    def pieces(self) -> Offsets:
        """The local offsets of this rank's pieces of documents; the first one may continue another rank's."""
        return self.pieces_of(self.rank)

    @cached_property
    def crosses(self) -> bool:
        """Whether any document has tokens on two ranks; otherwise nothing has to travel."""
        return any(self.continues(rank) for rank in range(1, self.ranks))

    @cached_property
    def chains(self) -> bool:
        """Whether the state of a document goes through a whole rank; otherwise no M has to travel."""
        return any(
            self.continues(rank) and self.keeps(rank) and self.continues(rank + 1) for rank in range(1, self.ranks - 1)
        )

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The ranks whose states come in here, oldest first; M of the oldest does not matter."""
        oldest = self.rank
        while self.continues(oldest):
            oldest -= 1
            if not self.keeps(oldest):
                break
        return tuple(range(oldest, self.rank))

    @cached_property
    def after(self) -> tuple[int, ...]:
        """The ranks that this rank's state reaches, nearest first; M of the last does not matter."""
        last = self.rank
        while last + 1 < self.ranks and self.continues(last + 1):
            last += 1
            if not self.keeps(last):
                break
        return tuple(range(self.rank + 1, last + 1))
