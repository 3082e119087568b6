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
    owner, ranks = layout.owner, layout.ranks
    middle = [(spans[0].lo + spans[-1].hi) // 2 for spans in map(layout.spans, range(ranks))]
    blocks: list[Block] = []
    for q, kv in needed_pairs(mask, layout):
        rows, keys = owner[q], owner[kv]
        if rows < keys:
            why = f"rows of rank {rows} see keys of rank {keys}, and it pairs causal work only"
            raise UnsupportedError("the balanced schedule on this mask", why, "schedule 'ring'")
        distance = rows - keys
        helps = 2 * distance > ranks
        if share_last and 2 * distance == ranks:
            helps = layout.chunks[q].lo < middle[rows]
        blocks.append(Block(ranks - distance, keys, q, kv) if helps else Block(distance, rows, q, kv))
    return tuple(blocks)
