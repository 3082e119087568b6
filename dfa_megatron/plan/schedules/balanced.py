"""Balanced schedules of causal work, the paper's and one in which no rank idles."""

from __future__ import annotations

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import Block, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask


def balanced(mask: Mask, layout: Layout, *, share_last: bool = False) -> tuple[Block, ...]:
    """Return the blocks of DISTFLASHATTN (paper, Algorithm 2, corrected for odd P), in floor(P/2) + 1 steps.

    At step t rank r works for itself on the keys t ranks before it while there are any (r >= t), and otherwise helps
    rank r - t + P with its own keys. For even P the pairs of the last step are met from above only: the ranks below P/2
    idle.

    Args:
        mask: only causal pairs.
        layout: contiguous; halves of it to share the last step.
        share_last: for even P cut the last step's blocks in two by query rows, so that no rank idles. The owner takes
            the second half of its rows, and the otherwise idle helper the first. That step stays the last, so the
            results that travel behind no compute are half a chunk, not a whole one.
    """
    ranks, needed = layout.ranks, needed_pairs(mask, layout)
    for q, kv in needed:
        if layout.owner[q] < layout.owner[kv]:
            ends = f"rows of rank {layout.owner[q]} see keys of rank {layout.owner[kv]}"
            why = f"{ends}, and it pairs causal work only"
            raise UnsupportedError("the balanced schedule on this mask", why, "schedule 'ring'")
    blocks: list[Block] = []
    for distance in range(ranks // 2 + 1):
        far = 2 * distance == ranks
        for rank in range(ranks):
            owns = rank >= distance
            if far and not owns and not share_last:
                continue
            owner, keys = (rank, rank - distance) if owns else (rank - distance + ranks, rank)
            rows = layout.of(owner)
            if far and share_last:
                middle = (layout.chunks[rows[0]].lo + layout.chunks[rows[-1]].hi) // 2
                rows = tuple(row for row in rows if (layout.chunks[row].lo >= middle) == owns)
            blocks += [Block(distance, rank, q, kv) for q in rows for kv in layout.of(keys) if (q, kv) in needed]
    return tuple(blocks)
