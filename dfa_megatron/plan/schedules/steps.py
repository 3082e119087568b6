"""From who computes which pairs of chunks to blocks: when each is computed, in few steps and bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.plan.language.ir import Block
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask

Pair = tuple[int, int]
"""(q_chunk, kv_chunk)."""

ROWS_PER_STEP = 2.0
"""Rows and keys of other ranks that a rank reads in one step, in rows of its own: what bounds its memory."""


def assign_steps(owned: Sequence[Sequence[Pair]], mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Blocks from who computes what: step 0 is local, help comes next, so that results travel behind what comes last,
    own rows. As few steps as memory allows, near ranks before far ones: a step is a kernel call and a wait.
    """
    home, ranks, rows = layout.home, layout.ranks, [len(chunk) for chunk in layout.chunks]
    limit = ROWS_PER_STEP * mask.length / ranks
    blocks: list[Block] = []
    for rank, pairs in enumerate(owned):
        steps: list[list[Pair]] = [[]]
        remote: list[list[Pair]] = [[], []]  # help, own rows
        for q, kv in pairs:
            (steps[0] if home[q] == rank == home[kv] else remote[home[q] == rank]).append((q, kv))
        for mine in remote:
            mine.sort(key=lambda pair: ((rank - home[pair[1]]) % ranks, (rank - home[pair[0]]) % ranks, pair))
            steps += _by_memory(rank, mine, home, rows, limit)
        blocks += [Block(step, rank, *pair) for step, mine in enumerate(steps) for pair in mine]
    return tuple(sorted(blocks))


def _by_memory(
    rank: int, pairs: Sequence[Pair], home: Sequence[int], rows: Sequence[int], limit: float
) -> list[list[Pair]]:
    """Pairs in this order in groups of which each reads at most so many rows of other ranks, if one pair alone does."""
    groups: list[list[Pair]] = []
    held: set[tuple[int, int]] = set()
    for pair in pairs:
        needs = {(side, chunk) for side, chunk in enumerate(pair) if home[chunk] != rank}
        if not groups or sum(rows[chunk] for _, chunk in held | needs) > limit:
            groups.append([])
            held = set()
        held |= needs
        groups[-1].append(pair)
    return groups
