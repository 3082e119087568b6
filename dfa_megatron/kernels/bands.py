"""The pairs that a band shows, and how a tile is cut for kernels with a window of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dfa_megatron.plan.language.geometry import UNBOUNDED, Band, Span, Tile


def visible(band: Band, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor | None:
    """Return the pairs that the band shows, bool (q_len, kv_len), or None where it shows all."""
    if band.left < 0 and band.right < 0:
        return None
    row = torch.arange(q_len, device=device).unsqueeze(1)
    column = torch.arange(kv_len, device=device).unsqueeze(0)
    distance = column - row - (kv_len - q_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if band.left >= 0:
        seen &= distance >= -band.left
    if band.right >= 0:
        seen &= distance <= band.right
    return seen


def uncut(tile: Tile) -> tuple[Tile, ...]:
    """Return the tile itself, for a kernel that takes any band without blind rows."""
    return (tile,)


def cut_rows(tile: Tile, rows: int) -> Iterator[Tile]:
    """Cut into tiles of at most `rows` rows, each shrunk to the columns that its rows see."""
    for start in range(tile.q.lo, tile.q.hi, rows):
        cut = tile.restrict(Span(start, start + rows), tile.kv)
        assert cut is not None, "a shrunk tile has no empty row"
        yield cut


def cut_tall(whole: Tile) -> Iterator[Tile]:
    """Cut into at most three tiles, each of them full or with no more rows than columns.

    FlashAttention-2 reads a bound of kv_len or more as no bound. This is wrong where rows outnumber columns. In a
    shrunk tile the right bound binds in the first kv_len - 1 rows only, and the left bound in the last kv_len - 1.
    """
    tile: Tile | None = whole
    while tile is not None:
        height = len(tile.kv)
        if tile.band.is_full or len(tile.q) <= height:
            yield tile
            return
        cut = tile.q.lo + height if tile.hi != UNBOUNDED else tile.q.hi - height
        head = tile.restrict(Span(tile.q.lo, cut), tile.kv)
        assert head is not None, "a shrunk tile has no empty row"
        yield head
        tile = tile.restrict(Span(cut, tile.q.hi), tile.kv)
