"""Packing: the fused pieces of a step, as of many documents, become few kernel calls of several segments."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.plan.language.geometry import Segment, Span, Tile
from dfa_megatron.plan.lowering.fuse import FusedTile

GAP = 2048
"""More rows than this between two segments are not spanned: to merge nothing costs more than another call."""


def packs(pieces: Sequence[FusedTile]) -> list[list[FusedTile]]:
    """The pieces in groups whose rows increase and are disjoint on both sides, so that one kernel call can do each.

    First fit in the order of rows, which is few groups; pieces of documents in order are one.
    """
    if len(pieces) == 1:
        return [list(pieces)]
    out: list[list[FusedTile]] = []
    within_reach: list[list[FusedTile]] = []
    for piece in sorted(pieces, key=lambda piece: (piece[0].q.lo, piece[0].kv.lo)):
        within_reach = [pack for pack in within_reach if piece[0].q.lo - pack[-1][0].q.hi <= GAP]
        pack = next((pack for pack in within_reach if _follows(pack[-1][0], piece[0])), None)
        if pack is None:
            pack = []
            out.append(pack)
            within_reach.append(pack)
        pack.append(piece)
    return out


def _follows(before: Tile, after: Tile) -> bool:
    return before.q.hi <= after.q.lo and 0 <= after.kv.lo - before.kv.hi <= GAP


def segments_of(pack: Sequence[FusedTile]) -> tuple[Span, Span, tuple[Segment, ...]]:
    """The rows from the first to the last segment of a pack on both sides, and its segments in these rows."""
    q, kv = (Span(first.lo, last.hi) for first, last in (
        (pack[0][0].q, pack[-1][0].q), (pack[0][0].kv, pack[-1][0].kv)
    ))  # fmt: skip
    segments = tuple(Segment(t.q.lo - q.lo, t.q.hi - q.lo, t.kv.lo - kv.lo, t.kv.hi - kv.lo, t.band) for t, _ in pack)
    return q, kv, segments
