"""Masks: a function returns the disjoint tiles of the pairs that may attend; `dfa_megatron.masks` publishes them.

In every definition i is a query and j a key. Tiles share no rows, which would be merged, but where it saves calls.
`components` are runs of tokens that attend only to one another, such as the documents of a pack.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import accumulate, pairwise
from operator import index
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile, tiles_with_blocks

__all__ = [
    "Mask",
    "Span",
    "Tile",
    "block_causal_documents",
    "causal",
    "causal_blockwise",
    "cross",
    "cross_documents",
    "documents",
    "full",
    "global_sliding",
    "prefix_lm",
    "prefix_lm_documents",
    "sliding_window",
    "two_sequences",
    "two_way_blocks",
    "union",
]


Args = TypeVarTuple("Args")
T = TypeVar("T")


def kept_on_mask(function: Callable[[Mask, *Args], T]) -> Callable[[Mask, *Args], T]:
    """Keep the results of a function of a mask and hashable arguments on that mask, as long as it lives."""

    @wraps(function)
    def kept(mask: Mask, *args: *Args) -> T:
        key = function, *args
        if key not in mask.kept:
            mask.kept[key] = function(mask, *args)
        found: T = mask.kept[key]
        return found

    return kept


@dataclass(frozen=True)
class Mask:
    """The (query, key) pairs of a sequence that attend, as disjoint tiles in global positions.

    `name` is for people and for digests; equal masks of different names are different plans.

    balanced_by: the mask whose work the layout "load_balanced" balances, None for this one. It lets layers of different
        masks share their tokens.
    queries: None where a token is a query and a key. Else that many positions are those of queries, and key j of a
        second sequence is at position queries + j.
    """

    name: str
    length: int
    tiles: tuple[Tile, ...]
    balanced_by: Mask | None = None
    queries: int | None = None

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Return the results that `kept_on_mask` keeps."""
        return {}

    def __hash__(self) -> int:
        return hash((self.name, self.length))  # a mask is a key of caches, and may have thousands of tiles

    def __reduce__(self) -> tuple[Any, ...]:
        return Mask, (self.name, self.length, self.tiles, self.balanced_by, self.queries)  # what follows from it stays

    def restrict(self, q: Span, kv: Span) -> tuple[Tile, ...]:
        """Return the tiles of the mask inside q x kv, each shrunk."""
        near = [t for t in self.tiles if t.q.lo < q.hi and q.lo < t.q.hi and t.kv.lo < kv.hi and kv.lo < t.kv.hi]
        return tuple([part for tile in near if (part := tile.restrict(q, kv))])

    @cached_property
    def area(self) -> int:
        """Return the number of pairs that attend."""
        return sum(tile.area for tile in self.tiles)


def _mask(name: str, length: int, tiles: Iterable[Tile]) -> Mask:
    if length <= 0:
        raise UnsupportedError(f"a mask of {length} tokens", f"it needs a positive length, got {length}", "1 or more")
    return Mask(name, index(length), tuple(shrunk for tile in tiles if (shrunk := tile.shrink())))


def union(name: str, length: int, tiles: Iterable[Tile]) -> Mask:
    """Return any mask: a pair attends if at least one of the tiles, which may overlap, holds it.

    Raises:
        ValueError: a tile reaches outside the sequence.
    """
    whole, apart = Span(0, length), list[Tile]()
    for tile in tiles:
        q, kv = (Span(index(side.lo), index(side.hi)) for side in (tile.q, tile.kv))
        if (shrunk := Tile(q, kv, index(tile.lo), index(tile.hi)).shrink()) is None:
            continue
        if shrunk.q & whole != shrunk.q or shrunk.kv & whole != shrunk.kv:
            raise ValueError(f"{tile} is not within the {length} tokens")
        new = [shrunk]
        for old in apart:
            new = [rest for part in new for rest in part - old]
        apart += new
    return _mask(name, length, apart)


def full(length: int) -> Mask:
    """Return the mask in which every token sees every token."""
    everything = Span(0, length)
    return _mask("full", length, [Tile(everything, everything)])


def causal(length: int) -> Mask:
    """Return the causal mask: j <= i."""
    everything = Span(0, length)
    return _mask("causal", length, [Tile(everything, everything, hi=0)])


def sliding_window(length: int, left: int, right: int = 0) -> Mask:
    """Return a window: i - left <= j <= i + right; -1 means no bound on that side."""
    lo, hi = _bounds(left, right)
    everything = Span(0, length)
    return _mask(f"window({left},{right})", length, [Tile(everything, everything, lo, hi)])


def documents(
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    room: Sequence[int] | None = None,
) -> Mask:
    """Return packed documents: a token sees its own document.

    Args:
        lengths: tokens of each document.
        room: tokens from each document's first to the next one's, for padding between them. It sees nothing and is not
            seen. Transformer Engine's cu_seqlens_padded has these differences, and its cu_seqlens has those of lengths.
        causal: j <= i as well.
        window_size: i - left <= j <= i + right as well, as in flash-attn; -1 means no bound on that side.
    """
    spans = places = _spans(lengths if room is None else room)
    if room is not None:
        if len(room) != len(lengths) or any(not 0 <= n <= most for n, most in zip(lengths, room, strict=True)):
            raise ValueError(f"documents of {list(lengths)} tokens do not fit in {list(room)}")
        places = [Span(span.lo, span.lo + n) for span, n in zip(spans, lengths, strict=True)]
    left, right = _normal_window(max(lengths), causal, window_size)
    lo, hi = _bounds(left, right)
    kind = {(-1, 0): "causal", (-1, -1): "full"}.get((left, right), f"window({left},{right})")
    name = f"documents({kind};{short_name(lengths)}{'' if room is None else ';' + short_name(room)})"
    return _mask(name, spans[-1].hi, [Tile(span, span, lo, hi) for span in places])


def cross(queries: int, keys: int, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Mask:
    """Return the mask of queries over the keys of another sequence, such as cross attention or a cached prefix.

    Causal and windows are aligned to the ends, as in flash-attn: query i is beside key i + keys - queries.
    """
    return cross_documents([queries], [keys], causal=causal, window_size=window_size)


def cross_documents(
    queries: Sequence[int], keys: Sequence[int], *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Mask:
    """Return packed pairs of documents: a query sees the keys of its pair, aligned to the ends as in `cross`.

    Args:
        queries, keys: tokens of each pair's document, in either sequence; 0 where it has none.
        causal, window_size: as for `documents`.
    """
    if len(queries) != len(keys) or min([*queries, *keys], default=-1) < 0:
        raise ValueError(f"pairs need as many lengths of queries as of keys, got {list(queries)} and {list(keys)}")
    lo, hi = _bounds(window_size[0], 0 if causal else window_size[1])
    rows, columns = ([Span(a, b) for a, b in pairwise(accumulate(one, initial=0))] for one in (queries, keys))
    apart = [(q, kv, kv.hi - q.hi) for q, kv in zip(rows, columns, strict=True)]
    tiles = [Tile(q, kv.shift(-by), lo, hi).shift(0, by) for q, kv, by in apart]
    kind = "causal" if causal else "full"
    name = f"cross({kind};{window_size[0]},{window_size[1]};{short_name(queries)};{short_name(keys)})"
    return two_sequences(name, sum(queries), sum(keys), tiles)


def two_sequences(name: str, queries: int, keys: int, tiles: Iterable[Tile]) -> Mask:
    """Return any mask of queries over the keys of another sequence, as `union` does: tiles of rows and columns.

    Raises:
        ValueError: a tile reaches outside the sequences.
    """
    whole = union(name, max(queries, keys), tiles)
    if any(tile.q.hi > queries or tile.kv.hi > keys for tile in whole.tiles):
        raise ValueError(f"a tile of {name!r} is not within {queries} queries and {keys} keys")
    return Mask(name, queries + keys, tuple(tile.shift(0, queries) for tile in whole.tiles), None, queries)


def prefix_lm(length: int, prefix: int) -> Mask:
    """Return a mask whose first `prefix` tokens are visible to all and that is causal beyond: j < prefix or j <= i."""
    if not 0 <= prefix <= length:
        raise ValueError(f"the prefix must lie within the {length} tokens, got {prefix}")
    return _mask(f"prefix({prefix})", length, tiles_with_blocks(Span(0, length), [Span(0, prefix)]))


def prefix_lm_documents(lengths: Sequence[int], prefix: int | Sequence[int]) -> Mask:
    """Return packed documents, each with a prefix that all its tokens see, and causal beyond it.

    Args:
        lengths: tokens of each document.
        prefix: tokens of each document's prefix, or one number for all; a shorter document is all prefix.
    """
    spans = _spans(lengths)
    prefixes = [prefix] * len(spans) if isinstance(prefix, int) else list(prefix)
    if len(prefixes) != len(spans) or min(prefixes) < 0:
        raise ValueError(f"{len(spans)} documents need as many prefixes of at least 0 tokens, got {prefixes}")
    firsts = [Span(span.lo, min(span.lo + own, span.hi)) for span, own in zip(spans, prefixes, strict=True)]
    tiles = [tile for span, first in zip(spans, firsts, strict=True) for tile in tiles_with_blocks(span, [first])]
    name = f"prefix documents({short_name(prefixes)};{short_name(lengths)})"
    return _mask(name, spans[-1].hi, tiles)


def causal_blockwise(lengths: Sequence[int]) -> Mask:
    """Return demonstrations and a test example: each block is causal and isolated; the last one sees all before it."""
    *blocks, last = _spans(lengths)
    tiles = [Tile(span, span, hi=0) for span in blocks]
    return _mask(f"causal blockwise({short_name(lengths)})", last.hi, [*tiles, Tile(last, Span(0, last.hi), hi=0)])


def block_causal_documents(lengths: Sequence[int], block: int) -> Mask:
    """Return packed documents cut into blocks, counted from each document's start, as in autoregressive video.

    A token sees its whole block and the blocks before it. The last block of a document may be shorter.
    """
    if block <= 0:
        raise ValueError(f"a block needs a positive length, got {block}")
    spans, tiles = _spans(lengths), list[Tile]()
    for span in spans:
        blocks = [Span(lo, min(lo + block, span.hi)) for lo in range(span.lo, span.hi, block)]
        tiles += tiles_with_blocks(span, blocks)
    return _mask(f"block causal documents({block};{short_name(lengths)})", spans[-1].hi, tiles)


def two_way_blocks(lengths: Sequence[int], blocks: Sequence[tuple[int, int]], left: int = -1) -> Mask:
    """Return packed causal documents in which the tokens of a block, such as an image, see each other too.

    Args:
        lengths: tokens of each document.
        blocks: the first token of each block and the one behind its last, in order; none reaches over two documents.
        left: j >= i - left as well; -1 means no bound.
    """
    lo, _ = _bounds(left, 0)
    tiles, waiting = list[Tile](), [Span(*block) for block in reversed(blocks)]
    for span in (spans := _spans(lengths)):
        at, own = span.lo, list[Span]()
        while waiting and waiting[-1].lo < span.hi:
            own.append(block := waiting.pop())
            if not at <= block.lo <= block.hi <= span.hi:
                raise ValueError(f"the block of tokens {block.lo} to {block.hi} overlaps another, or two documents")
            at = block.hi
        tiles += tiles_with_blocks(span, own, lo)
    if waiting:
        raise ValueError(f"the block that begins at token {waiting[-1].lo} lies behind the {spans[-1].hi} tokens")
    inside = short_name([edge for block in blocks for edge in block])
    return _mask(f"two-way blocks({inside};{left};{short_name(lengths)})", spans[-1].hi, tiles)


def global_sliding(length: int, window: int, tokens: int, *, causal: bool = False) -> Mask:
    """Return a mask: the first `tokens` tokens see all and are seen by all, others see `window` tokens to each side.

    i < tokens or j < tokens or -window <= j - i <= window; with `causal`, j <= i as well (window and sink tokens).
    The benchmark takes as many global tokens as the window has on one side.
    """
    if window < 0 or not 0 <= tokens <= length:
        raise ValueError(f"{tokens} global tokens and a window of {window} make no mask of {length} tokens")
    everything, first, rest = Span(0, length), Span(0, tokens), Span(tokens, length)
    right = 0 if causal else UNBOUNDED
    name = f"global({tokens})+window({window},{0 if causal else window})"
    tiles = [Tile(first, everything, hi=right), Tile(rest, first), Tile(rest, rest, -window, min(window, right))]
    return _mask(name, length, tiles)


def of_window(length: int, is_causal: bool, window_size: tuple[int, int]) -> Mask:
    """Return the mask of flash-attn's (causal, window_size) arguments for a sequence that attends to itself."""
    left, right = _normal_window(length, is_causal, window_size)
    if left == -1 and right in (-1, 0):
        return full(length) if right else causal(length)
    return sliding_window(length, left, right)


def _normal_window(length: int, is_causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """Normalize a window over sequences of up to `length` tokens: a bound that never binds becomes -1."""
    left, right = window_size[0], 0 if is_causal else window_size[1]
    return -1 if left >= length - 1 else left, -1 if right >= max(1, length - 1) else right


def _bounds(left: int, right: int) -> tuple[int, int]:
    """Return a window as the lower and upper bound of j - i."""
    if left < -1 or right < -1:
        raise ValueError(f"a window's sides are -1 (no bound) or at least 0, got {(left, right)}")
    return -UNBOUNDED if left == -1 else -left, UNBOUNDED if right == -1 else right


def _spans(lengths: Sequence[int]) -> list[Span]:
    if not lengths or min(lengths) <= 0:
        raise ValueError(f"document lengths must be positive, got {list(lengths)}")
    return [Span(lo, hi) for lo, hi in pairwise(accumulate(map(index, lengths), initial=0))]


def short_name(lengths: Sequence[int]) -> str:
    """Format the lengths; where they would fill the screen, give their count and a hash."""
    text = ",".join(map(str, lengths))
    if len(lengths) <= 8:
        return text
    return f"{len(lengths)} lengths #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


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
        work = [0] * (len(edges) - 1)
        for tile in self.tiles:
            first = max(0, bisect_right(edges, tile.q.lo) - 1)
            for at in range(first, min(len(work), bisect_left(edges, tile.q.hi))):
                work[at] += tile.area_in(Span(edges[at], edges[at + 1]))
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
    only = tiles[0]
    is_document = len(tiles) == 1 and only.hi == 0 and only.lo == -UNBOUNDED and only.q == only.kv
    return Component(Span(lo, hi), tuple(tiles), sum(tile.area for tile in tiles), is_document)
