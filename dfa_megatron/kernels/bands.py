"""What a band sees, and how a call is cut into pieces without empty rows that a kernel's own window can express."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from dfa_megatron.kernels.api import Saved, accumulator_dtype
from dfa_megatron.plan.language.geometry import UNBOUNDED, Band, Span, Tile

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Band], tuple[torch.Tensor, torch.Tensor]]
"""(q, k, v, band) -> (out, lse) of one piece."""

Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved, Band],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]
"""(dout, q, k, v, saved, band) -> (dq, dk, dv) of one piece."""


def visible(band: Band, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor | None:
    """Which pairs the band lets through, bool (q_len, kv_len), or None where it lets all through."""
    if band.is_full:
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


def tile_of(band: Band, q_len: int, kv_len: int) -> Tile | None:
    """The pairs of a call as a shrunk tile, rows and columns counted from the call's first; None where it has none."""
    offset = kv_len - q_len
    lo = -UNBOUNDED if band.left < 0 else offset - band.left
    hi = UNBOUNDED if band.right < 0 else offset + band.right
    return Tile(Span(0, q_len), Span(0, kv_len), lo, hi).shrink()


def cut_rows(tile: Tile | None, rows: int) -> Iterator[Tile]:
    """The tile in pieces of at most `rows` rows, each shrunk to the columns that its rows see."""
    if tile is None:
        return
    for start in range(tile.q.lo, tile.q.hi, rows):
        piece = tile.restrict(Span(start, start + rows), tile.kv)
        assert piece is not None, "a shrunk tile has no empty row"
        yield piece


def cut_tall(tile: Tile | None) -> Iterator[Tile]:
    """The tile in at most three pieces, each of them full or with no more rows than columns.

    FlashAttention-2 reads a bound of kv_len or more as no bound, which is wrong where rows outnumber columns. In a
    shrunk tile the right bound binds in the first kv_len - 1 rows only, and the left bound in the last kv_len - 1.
    """
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


def forward_by_pieces(
    pieces: Sequence[Tile], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece_forward: Forward
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call from those of pieces with disjoint rows; rows in no piece get 0 and -inf."""
    batch, q_len, heads, _ = q.shape
    if len(pieces) == 1 and len(pieces[0].q) == q_len:
        (only,) = pieces
        return piece_forward(q, k[:, only.kv.lo : only.kv.hi], v[:, only.kv.lo : only.kv.hi], only.band)
    out = q.new_zeros(batch, q_len, heads, v.shape[-1])
    lse = q.new_full((batch, heads, q_len), -math.inf, dtype=accumulator_dtype(q.dtype))
    for piece in pieces:
        rows, columns = slice(piece.q.lo, piece.q.hi), slice(piece.kv.lo, piece.kv.hi)
        out[:, rows], lse[:, :, rows] = piece_forward(q[:, rows], k[:, columns], v[:, columns], piece.band)
    return out, lse


def backward_by_pieces(
    pieces: Sequence[Tile],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    piece_backward: Backward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a call from those of pieces with disjoint rows; dk and dv are summed in the accumulator dtype."""
    if len(pieces) == 1 and len(pieces[0].q) == q.shape[1] and len(pieces[0].kv) == k.shape[1]:
        return piece_backward(dout, q, k, v, saved, pieces[0].band)
    accumulate = accumulator_dtype(q.dtype)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape, dtype=accumulate), v.new_zeros(v.shape, dtype=accumulate)
    for piece in pieces:
        rows, columns = slice(piece.q.lo, piece.q.hi), slice(piece.kv.lo, piece.kv.hi)
        of_rows = Saved(
            lse=saved.lse[:, :, rows],
            delta=None if saved.delta is None else saved.delta[:, :, rows],
            out=None if saved.out is None else saved.out[:, rows],
        )
        dq[:, rows], dk_piece, dv_piece = piece_backward(
            dout[:, rows], q[:, rows], k[:, columns], v[:, columns], of_rows, piece.band
        )
        dk[:, columns] += dk_piece
        dv[:, columns] += dv_piece
    return dq, dk.to(k.dtype), dv.to(v.dtype)


class InPieces:
    """`BlockKernel.forward` and `backward` of a kernel that computes pieces, none of which has an empty row."""

    def pieces(self, tile: Tile | None) -> list[Tile]:
        """What a call, as a shrunk tile, is cut into: itself, or nothing."""
        return [] if tile is None else [tile]

    def piece_forward(
        self, softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of one piece."""
        raise NotImplementedError

    def piece_backward(
        self,
        softmax_scale: float,
        deterministic: bool,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        band: Band,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of one piece."""
        raise NotImplementedError

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, band: Band, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockKernel.forward`."""
        pieces = self.pieces(tile_of(band, q.shape[1], k.shape[1]))
        return forward_by_pieces(pieces, q, k, v, functools.partial(self.piece_forward, softmax_scale))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        *,
        band: Band,
        softmax_scale: float,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `BlockKernel.backward`; reads of `saved` what `reads` names."""
        pieces = self.pieces(tile_of(band, q.shape[1], k.shape[1]))
        piece_backward = functools.partial(self.piece_backward, softmax_scale, deterministic)
        return backward_by_pieces(pieces, dout, q, k, v, saved, piece_backward)
