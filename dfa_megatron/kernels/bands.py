"""The (query, key) pairs that a band shows, and ways to divide a tile before a kernel launch."""

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
    """Do not divide: for kernels that take any band in which every row sees a key, as in the shrunk tile given here."""
    return (tile,)


def cut_rows(tile: Tile, rows: int) -> Iterator[Tile]:
    """Cut into tiles of at most `rows` rows, each shrunk to the columns that its rows see."""
    for start in range(tile.q.lo, tile.q.hi, rows):
        cut = tile.restrict(Span(start, start + rows), tile.kv)
        assert cut is not None, "a shrunk tile has no empty row"
        yield cut


def cut_tall(whole: Tile) -> Iterator[Tile]:
    """Cut into at most three tiles, each of them full or with no more rows than columns.

    FlashAttention-2 ignores a right bound of kv_len or more, and adds a right bound of kv_len to a left bound that
    stands alone. Both change the result only if rows outnumber columns. The right bound hides pairs only in the first
    kv_len - 1 rows, the left bound only in the last kv_len - 1. So cut those rows off; the middle is full.
    """
    tile: Tile | None = whole
    while tile is not None:
        columns = len(tile.kv)
        if tile.band.is_full or len(tile.q) <= columns:
            yield tile
            return
        cut = tile.q.lo + columns if tile.hi != UNBOUNDED else tile.q.hi - columns  # tile.hi bounds j - i
        head = tile.restrict(Span(tile.q.lo, cut), tile.kv)
        assert head is not None, "a shrunk tile has no empty row"
        yield head
        tile = tile.restrict(Span(cut, tile.q.hi), tile.kv)
