"""Geometry of attention. A mask is a set of disjoint tiles; a tile is a rectangle cut by a diagonal band."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from dfa_megatron.plan.language.work import FAR, GATHER, KEY, ROW

UNBOUNDED = 1 << 60
"""A diagonal bound that never binds."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The half-open range of token positions lo <= i < hi."""

    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo if self.hi > self.lo else 0

    def __and__(self, other: Span) -> Span:
        lo, hi = self.lo, self.hi
        if lo >= other.lo and hi <= other.hi:
            return self
        return Span(lo if lo > other.lo else other.lo, hi if hi < other.hi else other.hi)

    def holds(self, other: Span) -> bool:
        """Return whether every position of the other range is in this one."""
        return self.lo <= other.lo and other.hi <= self.hi

    def shift(self, by: int) -> Span:
        """Return the same range, `by` positions later."""
        return Span(self.lo + by, self.hi + by) if by else self


def covers(spans: Iterable[Span], whole: Span) -> bool:
    """Return whether the spans together hold every position of `whole`."""
    apart = []
    for span in spans:
        if span.lo <= whole.lo and whole.hi <= span.hi:
            return True  # the usual case, without a sort
        apart.append(span)
    reached = whole.lo
    for span in sorted(apart, key=lambda span: span.lo):
        if span.lo > reached:
            break
        reached = max(reached, span.hi)
    return reached >= whole.hi


@dataclass(frozen=True, slots=True, order=True)
class Band:
    """The window of one kernel call in flash-attn's convention: aligned to the bottom right, -1 means no bound.

    Row i of q_len sees column j of kv_len when -left <= j - i - (kv_len - q_len) <= right.
    """

    left: int
    right: int

    @property
    def is_full(self) -> bool:
        """Return whether no pair is masked."""
        return self.left < 0 and self.right < 0


FULL = Band(-1, -1)
CAUSAL = Band(-1, 0)

Form = Literal["full", "causal", "band"]
"""full: no pair is masked. causal: right = 0, left unbounded, q_len = kv_len. band: any other window."""


def form_of(band: Band, q_len: int, kv_len: int) -> Form:
    """Return the simplest form of a call; a kernel is selected by it."""
    if band.is_full:
        return "full"
    return "causal" if band.left < 0 and band.right == 0 and q_len == kv_len else "band"


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Query rows q_lo..q_hi of a kernel call, which see key rows kv_lo..kv_hi through a band over exactly these."""

    q_lo: int
    q_hi: int
    kv_lo: int
    kv_hi: int
    band: Band

    @property
    def tile(self) -> Tile:
        """Return the segment's pairs, in the call's rows."""
        offset = self.kv_hi - self.q_hi
        lo = -UNBOUNDED if self.band.left < 0 else offset - self.band.left
        hi = UNBOUNDED if self.band.right < 0 else offset + self.band.right
        return Tile(Span(self.q_lo, self.q_hi), Span(self.kv_lo, self.kv_hi), lo, hi)


class Tile(NamedTuple):
    """The pairs (i, j) with i in q, j in kv and lo <= j - i <= hi, all in global token positions."""

    q: Span
    kv: Span
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    def shrink(self) -> Tile | None:
        """Return the smallest equal tile, or None if no pair is left.

        No row or column of the result is wholly masked, and a bound that never binds is unbounded. Two tiles that hold
        the same pairs are therefore equal after this.
        """
        return self.restrict(self.q, self.kv)

    def restrict(self, q: Span, kv: Span) -> Tile | None:
        """Return the part of this tile inside q x kv, shrunk.

        Plans restrict tiles hundreds of thousands of times, and objects take most of the time. So a tile returns itself
        where nothing changes, and spans that are there where they fit.
        """
        mine, theirs, lo, hi = self.q, self.kv, self.lo, self.hi
        q0, q1 = (mine.lo if mine.lo > q.lo else q.lo), (mine.hi if mine.hi < q.hi else q.hi)
        k0, k1 = (theirs.lo if theirs.lo > kv.lo else kv.lo), (theirs.hi if theirs.hi < kv.hi else kv.hi)
        if q0 >= q1 or k0 >= k1 or lo > hi:
            return None
        q0, q1 = (q0 if q0 > k0 - hi else k0 - hi), (q1 if q1 < k1 - lo else k1 - lo)
        if q0 >= q1:
            return None
        k0, k1 = (k0 if k0 > q0 + lo else q0 + lo), (k1 if k1 < q1 + hi else q1 + hi)
        if k0 >= k1:
            return None
        if lo <= k0 - (q1 - 1):
            lo = -UNBOUNDED
        if hi >= (k1 - 1) - q0:
            hi = UNBOUNDED
        same_rows, same_columns = q0 == mine.lo and q1 == mine.hi, k0 == theirs.lo and k1 == theirs.hi
        if same_rows and same_columns and lo == self.lo and hi == self.hi:
            return self
        if not same_rows:
            mine = q if q0 == q.lo and q1 == q.hi else Span(q0, q1)
        if not same_columns:
            theirs = kv if k0 == kv.lo and k1 == kv.hi else Span(k0, k1)
        return Tile(mine, theirs, lo, hi)

    def __and__(self, other: Tile) -> Tile | None:
        """Return the pairs that both tiles hold."""
        q, kv = other.q, other.kv
        if self.q.lo >= q.hi or q.lo >= self.q.hi or self.kv.lo >= kv.hi or kv.lo >= self.kv.hi:
            return None
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        return Tile(self.q, self.kv, lo, hi).restrict(q, kv)

    def holds(self, other: Tile) -> bool:
        """Return whether every pair of the other tile is in this one, if the other is shrunk."""
        q, kv = other.q, other.kv
        if not (self.q.lo <= q.lo and q.hi <= self.q.hi and self.kv.lo <= kv.lo and kv.hi <= self.kv.hi):
            return False
        lo, hi = max(other.lo, kv.lo - q.hi + 1), min(other.hi, kv.hi - q.lo - 1)
        return self.lo <= lo and hi <= self.hi

    def __sub__(self, other: Tile) -> tuple[Tile, ...]:
        """Return the pairs that only this tile holds, as disjoint tiles.

        They are whole rows above and below the other tile, whole columns beside it, then both sides of its band.
        """
        both = self & other
        if both is None:
            return (self,)
        q, kv = both.q, both.kv
        parts = (
            Tile(Span(self.q.lo, q.lo), self.kv, self.lo, self.hi),
            Tile(Span(q.hi, self.q.hi), self.kv, self.lo, self.hi),
            Tile(q, Span(self.kv.lo, kv.lo), self.lo, self.hi),
            Tile(q, Span(kv.hi, self.kv.hi), self.lo, self.hi),
            Tile(q, kv, self.lo, min(self.hi, both.lo - 1)),
            Tile(q, kv, max(self.lo, both.hi + 1), self.hi),
        )
        return tuple(shrunk for part in parts if (shrunk := part.shrink()))

    def shift(self, q: int, kv: int) -> Tile:
        """Return the same pairs with the rows moved by q positions and the columns by kv."""
        if not q and not kv:
            return self
        lo = self.lo if self.lo == -UNBOUNDED else self.lo + kv - q
        hi = self.hi if self.hi == UNBOUNDED else self.hi + kv - q
        return Tile(self.q.shift(q), self.kv.shift(kv), lo, hi)

    @property
    def area(self) -> int:
        """Return the number of pairs, in closed form."""
        return self.area_in(self.q)

    def area_in(self, q: Span) -> int:
        """Return the number of pairs in these rows."""
        mine, kv = self.q, self.kv
        first = mine.lo if mine.lo > q.lo else q.lo
        rows, columns = (mine.hi if mine.hi < q.hi else q.hi) - first, kv.hi - kv.lo
        if rows <= 0 or columns <= 0 or self.lo > self.hi:
            return 0
        offset = first - kv.lo
        below_hi = rows * columns if self.hi == UNBOUNDED else _pairs_up_to(rows, columns, self.hi + offset)
        below_lo = 0 if self.lo == -UNBOUNDED else _pairs_up_to(rows, columns, self.lo - 1 + offset)
        return below_hi - below_lo

    @property
    def band(self) -> Band:
        """Return this tile as a kernel's window over exactly its rows and columns."""
        offset = self.kv.hi - self.q.hi
        left = -1 if self.lo == -UNBOUNDED else offset - self.lo
        right = -1 if self.hi == UNBOUNDED else self.hi - offset
        return Band(left, right)

    @property
    def form(self) -> Form:
        """Return the form of a kernel call over this tile."""
        if self.lo == -UNBOUNDED and self.hi == UNBOUNDED:
            return "full"
        return form_of(self.band, self.q.hi - self.q.lo, self.kv.hi - self.kv.lo)


def tiles_with_blocks(span: Span, blocks: Sequence[Span], lo: int = -UNBOUNDED) -> list[Tile]:
    """Return the tiles of a causal document in which the tokens of each block see each other, too.

    Each row is in one tile, and the tiles read the same keys again. Where these are many, the rows of blocks are in two
    tiles: one kernel call computes the document, and one all blocks.
    """
    edges = [span.lo, *(at for block in blocks for at in (block.lo, block.hi)), span.hi]
    rows = enumerate(pairwise(edges))  # odd ones are of blocks
    each = [Tile(Span(q, end), Span(span.lo, end), lo, UNBOUNDED if at % 2 else 0) for at, (q, end) in rows]
    tiles = [shrunk for tile in each if (shrunk := tile.shrink())]
    again = sum(len(tile.kv) for tile in tiles) - len(span)
    if len(span) > FAR and again > 4 * ROW // (KEY + GATHER) * sum(map(len, blocks)):
        return [Tile(span, span, lo, 0), *(Tile(block, block, 1) for block in blocks)]
    return tiles


def _pairs_up_to(rows: int, columns: int, diagonal: int) -> int:
    """Return the number of (a, b), 0 <= a < rows, 0 <= b < columns, with b - a <= diagonal."""
    return _columns_up_to(columns, rows + diagonal) - _columns_up_to(columns, diagonal)


def _columns_up_to(columns: int, last: int) -> int:
    """Return the sum of y, between 0 and `columns`, for y <= last."""
    if last <= 0:
        return 0
    if last <= columns:
        return last * (last + 1) // 2
    return columns * (columns + 1) // 2 + (last - columns) * columns


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in their order, with touching neighbours joined."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].hi == span.lo:
            joined[-1] = Span(joined[-1].lo, span.hi)
        else:
            joined.append(span)
    return joined
