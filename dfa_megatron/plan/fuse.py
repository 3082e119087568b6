"""Fusion: the tiles that one rank computes in one step become as few rectangles-with-a-band as possible."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.plan.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.ir import Block

Piece = tuple[Tile, tuple[Block, ...]]


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


def fuse(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge pieces whose union is one tile: first all at once, then pair by pair until nothing merges."""
    pieces = list(pieces)
    if len(pieces) > 1 and (one := union([tile for tile, _ in pieces])):
        return [(one, tuple(sorted({block for _, blocks in pieces for block in blocks})))]
    merged = True
    while merged:
        merged = False
        for first in range(len(pieces)):
            for second in range(first):
                one = union([pieces[first][0], pieces[second][0]])
                if one is None:
                    continue
                blocks = tuple(sorted({*pieces[first][1], *pieces[second][1]}))
                pieces = [piece for at, piece in enumerate(pieces) if at not in (first, second)] + [(one, blocks)]
                merged = True
                break
            if merged:
                break
    return pieces
