"""Group the fused tiles of a step, such as those of many documents, into few kernel calls of several segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from dfa_megatron.plan.language.geometry import Segment, Span, Tile
from dfa_megatron.plan.language.ir import Block
from dfa_megatron.plan.lowering.fuse import FusedTile, fuse, without_bands

GAP = 2048
"""The largest gap in rows between two segments of one call. A larger gap costs more in merges than another call."""

COPIED = 2048
"""Rows that a kernel copies in the time of another call. Some copy the rows of a call with gaps to be adjacent."""


class Launch(NamedTuple):
    """What one kernel call computes: spans of rows, the segments relative to them, their blocks and number of pairs."""

    q: Span
    kv: Span
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    area: int


@lru_cache(maxsize=16)  # a forward and its backward ask for the same
def launches(tiles: tuple[FusedTile, ...], bands: bool) -> tuple[Launch, ...]:
    """Return the kernel calls for tiles in rows of the same buffers.

    Args:
        tiles: each with its block.
        bands: the kernel takes windows that are neither full nor square causal.
    """
    fused = fuse(tiles)
    return tuple(map(_launch, packs(fused if bands else without_bands(fused, tiles))))


def _launch(group: Sequence[FusedTile]) -> Launch:
    blocks = {block for _, its in group for block in its}
    area = sum(tile.area for tile, _ in group)
    return Launch(*segments_of(group), tuple(sorted(blocks)), area)


def packs(tiles: Sequence[FusedTile]) -> list[list[FusedTile]]:
    """Group tiles so that one kernel call can compute each group: rows increase and are disjoint on both sides.

    Uses first fit in the order of rows, which makes few groups; tiles of consecutive documents make one.
    """
    if len(tiles) == 1:
        return [list(tiles)]
    out: list[list[FusedTile]] = []
    within_reach: list[list[FusedTile]] = []
    for fused in sorted(tiles, key=lambda fused: (fused[0].q.lo, fused[0].kv.lo)):
        within_reach = [group for group in within_reach if fused[0].q.lo - group[-1][0].q.hi <= GAP]
        group = next((group for group in within_reach if _follows(group[-1][0], fused[0])), None)
        if group is None:
            group = []
            out.append(group)
            within_reach.append(group)
        group.append(fused)
    return [part for group in out for part in _without_gaps(group)]


def _without_gaps(group: list[FusedTile]) -> list[list[FusedTile]]:
    """Split a group at the gaps between its query rows, if more calls take less time than copies of its rows."""
    runs = [group[:1]]
    for before, fused in pairwise(group):
        if before[0].q.hi < fused[0].q.lo:
            runs.append([])
        runs[-1].append(fused)
    rows = sum(len(tile.q) for tile, _ in group)
    return runs if rows > COPIED * (len(runs) - 1) else [group]


def _follows(before: Tile, after: Tile) -> bool:
    return before.q.hi <= after.q.lo and 0 <= after.kv.lo - before.kv.hi <= GAP


def segments_of(group: Sequence[FusedTile]) -> tuple[Span, Span, tuple[Segment, ...]]:
    """Return the spans of a group's rows, q and kv, and its segments relative to these spans."""
    q, kv = (Span(first.lo, last.hi) for first, last in (
        (group[0][0].q, group[-1][0].q), (group[0][0].kv, group[-1][0].kv)
    ))  # fmt: skip
    segments = tuple(Segment(t.q.lo - q.lo, t.q.hi - q.lo, t.kv.lo - kv.lo, t.kv.hi - kv.lo, t.band) for t, _ in group)
    return q, kv, segments
