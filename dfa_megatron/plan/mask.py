"""Masks: a function returns the disjoint tiles of the pairs that may attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dfa_megatron.plan.geometry import UNBOUNDED, Span, Tile


@dataclass(frozen=True, slots=True)
class Mask:
    """Which (query, key) pairs of a sequence attend: disjoint tiles in global positions.

    `name` is for people and for digests; equal masks of different names are different plans.
    """

    name: str
    length: int
    tiles: tuple[Tile, ...]

    def restrict(self, q: Span, kv: Span) -> tuple[Tile, ...]:
        """The tiles of the mask inside q x kv, each shrunk."""
        return tuple(part for tile in self.tiles if (part := tile.restrict(q, kv)))

    @property
    def area(self) -> int:
        """The number of pairs that attend."""
        return sum(tile.area for tile in self.tiles)


def _mask(name: str, length: int, tiles: Sequence[Tile]) -> Mask:
    if length <= 0:
        raise ValueError(f"a mask needs a positive length, got {length}")
    return Mask(name, length, tuple(shrunk for tile in tiles if (shrunk := tile.shrink())))


def full(length: int) -> Mask:
    """Every token sees every token."""
    everything = Span(0, length)
    return _mask("full", length, [Tile(everything, everything)])


def causal(length: int) -> Mask:
    """A token sees itself and what is before it."""
    everything = Span(0, length)
    return _mask("causal", length, [Tile(everything, everything, hi=0)])


def sliding_window(length: int, left: int, right: int = 0) -> Mask:
    """A token sees `left` tokens before it, itself, and `right` tokens after it; -1 means no bound on that side."""
    if left < -1 or right < -1:
        raise ValueError(f"a window's sides are -1 (no bound) or at least 0, got {(left, right)}")
    everything = Span(0, length)
    lo = -UNBOUNDED if left == -1 else -left
    hi = UNBOUNDED if right == -1 else right
    return _mask(f"window({left},{right})", length, [Tile(everything, everything, lo, hi)])


def documents(lengths: Sequence[int], *, causal: bool = True) -> Mask:
    """Packed documents: a token sees its own document, only backwards if causal."""
    if not lengths or min(lengths) <= 0:
        raise ValueError(f"document lengths must be positive, got {list(lengths)}")
    edges = list(accumulate(lengths, initial=0))
    spans = [Span(lo, hi) for lo, hi in pairwise(edges)]
    kind = "causal" if causal else "full"
    name = f"documents({kind};{','.join(map(str, lengths))})"
    return _mask(name, edges[-1], [Tile(span, span, hi=0 if causal else UNBOUNDED) for span in spans])


def prefix_lm(length: int, prefix: int) -> Mask:
    """Every token sees the first `prefix` tokens; beyond them attention is causal."""
    if not 0 <= prefix <= length:
        raise ValueError(f"the prefix must lie within the {length} tokens, got {prefix}")
    rest = Span(prefix, length)
    return _mask(f"prefix({prefix})", length, [Tile(Span(0, length), Span(0, prefix)), Tile(rest, rest, hi=0)])


def of_window(length: int, is_causal: bool, window_size: tuple[int, int]) -> Mask:
    """The mask of flash-attn's (causal, window_size) arguments for a sequence that attends to itself."""
    left, right = window_size
    if is_causal:
        right = 0
    if left >= length - 1:
        left = -1
    if right >= length - 1 and right != 0:
        right = -1
    if (left, right) == (-1, -1):
        return full(length)
    if (left, right) == (-1, 0):
        return causal(length)
    return sliding_window(length, left, right)
