"""Fusion: the tiles that one rank computes in one step become as few rectangles-with-a-band as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.ir import Block

FusedTile = tuple[Tile, tuple[Block, ...]]

_FEW = 8
"""Up to this many pieces every pair is tried; beyond, only neighbours."""


def union(tiles: Sequence[Tile]) -> Tile | None:
    """One tile equal to the disjoint union of these (shrunk) tiles, or None if there is none."""
    q = Span(min(t.q.lo for t in tiles), max(t.q.hi for t in tiles))
    kv = Span(min(t.kv.lo for t in tiles), max(t.kv.hi for t in tiles))
    area = sum(tile.area for tile in tiles)
    for hi in sorted({UNBOUNDED} | {t.hi for t in tiles}):
        for lo in sorted({-UNBOUNDED} | {t.lo for t in tiles}):
            one = Tile(q, kv, lo, hi).shrink()
            if one and one.area == area and all(one.restrict(tile.q, tile.kv) == tile for tile in tiles):
                return one
    return None


def fuse(pieces: Sequence[FusedTile]) -> list[FusedTile]:
    """Merge pieces whose union is one tile: all at once, else along rows and columns, else pair by pair."""
    pieces = list(pieces)
    if len(pieces) > 1 and (one := union([tile for tile, _ in pieces])):
        return [(one, _blocks(pieces))]
    before = 0
    while len(pieces) > 1 and len(pieces) != before:
        before = len(pieces)
        pieces = _along(pieces, lambda piece: (piece[0].q.lo, piece[0].kv.lo))
        pieces = _along(pieces, lambda piece: (piece[0].kv.lo, piece[0].q.lo))
    return _pair_by_pair(pieces) if len(pieces) <= _FEW else pieces


def _along(pieces: list[FusedTile], order: Callable[[FusedTile], Any]) -> list[FusedTile]:
    """Merge each piece into the one before it, in this order, where they make one."""
    out: list[FusedTile] = []
    for piece in sorted(pieces, key=order):
        one = _union_of_two(out[-1][0], piece[0]) if out else None
        if one is None:
            out.append(piece)
        else:
            out[-1] = one, _blocks([out[-1], piece])
    return out


def _pair_by_pair(pieces: list[FusedTile]) -> list[FusedTile]:
    for second in range(len(pieces)):
        for first in range(second):
            if one := _union_of_two(pieces[first][0], pieces[second][0]):
                rest = [piece for at, piece in enumerate(pieces) if at not in (first, second)]
                return _pair_by_pair([*rest, (one, _blocks([pieces[first], pieces[second]]))])
    return pieces


def _union_of_two(one: Tile, other: Tile) -> Tile | None:
    """`union`, after a look at whether they touch, and at more than a corner: as packed documents do, which makes no
    tile but that of a single diagonal, with a pair per row.
    """
    if one.q.hi < other.q.lo or other.q.hi < one.q.lo or one.kv.hi < other.kv.lo or other.kv.hi < one.kv.lo:
        return None
    corner = (one.q.hi == other.q.lo or other.q.hi == one.q.lo) and (
        one.kv.hi == other.kv.lo or other.kv.hi == one.kv.lo
    )
    if corner and one.area > len(one.q):
        return None
    return union([one, other])


def _blocks(pieces: Sequence[FusedTile]) -> tuple[Block, ...]:
    return tuple(sorted({block for _, blocks in pieces for block in blocks}))
