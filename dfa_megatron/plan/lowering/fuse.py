"""Fuse the tiles that one rank computes in one step into as few tiles as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.ir import Block

FusedTile = tuple[Tile, tuple[Block, ...]]

_FEW = 8
"""Up to this many tiles every pair is tried; beyond it, only neighbours."""


def union(tiles: Sequence[Tile]) -> Tile | None:
    """Return one tile equal to the disjoint union of these (shrunk) tiles, or None if there is none.

    A bound that binds in a shrunk tile is one of the union's, so there is one tile that may be it.
    """
    first, *others = tiles
    q_lo, q_hi, kv_lo, kv_hi, lo, hi = first.q.lo, first.q.hi, first.kv.lo, first.kv.hi, first.lo, first.hi
    for t in others:
        lo, hi = max(lo, t.lo), min(hi, t.hi)
        q_lo, q_hi = min(q_lo, t.q.lo), max(q_hi, t.q.hi)
        kv_lo, kv_hi = min(kv_lo, t.kv.lo), max(kv_hi, t.kv.hi)
    if any(t.lo not in (lo, -UNBOUNDED) or t.hi not in (hi, UNBOUNDED) for t in tiles):
        return None
    one = Tile(Span(q_lo, q_hi), Span(kv_lo, kv_hi), lo, hi).shrink()
    if one is None or one.area != sum(tile.area for tile in tiles):
        return None
    return one if all(one.restrict(tile.q, tile.kv) == tile for tile in tiles) else None


def fuse(tiles: Sequence[FusedTile]) -> list[FusedTile]:
    """Fuse tiles whose union is one tile: all at once, else along rows and columns, else pair by pair."""
    tiles = list(tiles)
    if len(tiles) > 1 and (one := union([tile for tile, _ in tiles])):
        return [(one, _blocks(tiles))]
    before = 0
    while len(tiles) > 1 and len(tiles) != before:
        before = len(tiles)
        tiles = _along(tiles, lambda fused: (fused[0].q.lo, fused[0].kv.lo))
        tiles = _along(tiles, lambda fused: (fused[0].kv.lo, fused[0].q.lo))
    return _pair_by_pair(tiles) if len(tiles) <= _FEW else tiles


def without_bands(fused: Sequence[FusedTile], tiles: Sequence[FusedTile]) -> list[FusedTile]:
    """Return fused tiles, with those that became a band taken apart again into the tiles that they were fused from."""
    out: list[FusedTile] = []
    for one in fused:
        inside = [part for part in tiles if one[0].restrict(part[0].q, part[0].kv) == part[0]]
        out += inside if one[0].form == "band" else [one]
    return out


def _along(tiles: list[FusedTile], order: Callable[[FusedTile], Any]) -> list[FusedTile]:
    """Fuse each tile with the one before it, in this order, where the two make one tile."""
    out: list[FusedTile] = []
    for fused in sorted(tiles, key=order):
        one = _union_of_two(out[-1][0], fused[0]) if out else None
        if one is None:
            out.append(fused)
        else:
            out[-1] = one, _blocks([out[-1], fused])
    return out


def _pair_by_pair(tiles: list[FusedTile]) -> list[FusedTile]:
    for second in range(len(tiles)):
        for first in range(second):
            if one := _union_of_two(tiles[first][0], tiles[second][0]):
                rest = [fused for at, fused in enumerate(tiles) if at not in (first, second)]
                return _pair_by_pair([*rest, (one, _blocks([tiles[first], tiles[second]]))])
    return tiles


def _union_of_two(one: Tile, other: Tile) -> Tile | None:
    """Return `union` with an early exit.

    Tiles that do not touch, or touch only at a corner like consecutive documents, cannot form one tile, unless there is
    only one pair per row.
    """
    if one.q.hi < other.q.lo or other.q.hi < one.q.lo or one.kv.hi < other.kv.lo or other.kv.hi < one.kv.lo:
        return None
    corner = (one.q.hi == other.q.lo or other.q.hi == one.q.lo) and (
        one.kv.hi == other.kv.lo or other.kv.hi == one.kv.lo
    )
    if corner and one.area > len(one.q):
        return None
    return union([one, other])


def _blocks(tiles: Sequence[FusedTile]) -> tuple[Block, ...]:
    return tuple(sorted({block for _, blocks in tiles for block in blocks}))
