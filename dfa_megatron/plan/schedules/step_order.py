"""Assign steps to pairs (q_chunk, kv_chunk), where ranks compute their own rows: in ring order, or in few steps."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.plan.language.ir import Block, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask

ROWS_PER_STEP = 2.0
"""Limit of remote rows and keys that a rank reads in one step, in rows of its own. It bounds memory."""


def by_distance(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in ring order: at step t, rank r computes its own rows against the chunks of rank r - t."""
    owner, ranks = layout.owner, layout.ranks
    return tuple([Block((owner[q] - owner[kv]) % ranks, owner[q], q, kv) for q, kv in needed_pairs(mask, layout)])


def by_memory(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in as few steps as each rank's remote work fills, for load_balanced tokens. Owners compute."""
    owned: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
    for q, kv in needed_pairs(mask, layout):
        owned[layout.owner[q]].append((q, kv))
    return assign_steps(owned, mask, layout)


def assign_steps(owned: Sequence[Sequence[tuple[int, int]]], mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks with steps: step 0 is local, help follows, then own rows, so that results travel behind them.

    Steps are as few as memory allows, near ranks before far ones, because a step is a kernel call and a wait.
    """
    owner, ranks, rows = layout.owner, layout.ranks, [len(chunk) for chunk in layout.chunks]
    limit = ROWS_PER_STEP * mask.length / ranks
    blocks: list[Block] = []
    for rank, pairs in enumerate(owned):
        steps = [[(q, kv) for q, kv in pairs if owner[q] == rank == owner[kv]]]
        help_first = [(q, kv) for q, kv in pairs if owner[q] != rank]
        own_rows = [(q, kv) for q, kv in pairs if owner[q] == rank != owner[kv]]
        for mine in (help_first, own_rows):
            mine.sort(key=lambda pair: ((rank - owner[pair[1]]) % ranks, (rank - owner[pair[0]]) % ranks, pair))
            steps += _by_memory(rank, mine, owner, rows, limit)
        blocks += [Block(step, rank, *pair) for step, mine in enumerate(steps) for pair in mine]
    return tuple(blocks)


def _by_memory(
    rank: int, pairs: Sequence[tuple[int, int]], owner: Sequence[int], rows: Sequence[int], limit: float
) -> list[list[tuple[int, int]]]:
    """Split the pairs, in order, into groups that each read at most `limit` remote rows.

    A pair that alone exceeds the limit forms its own group.
    """
    groups: list[list[tuple[int, int]]] = []
    held: set[tuple[int, int]] = set()
    read = 0
    for pair in pairs:
        needs = [(side, chunk) for side, chunk in enumerate(pair) if owner[chunk] != rank]
        more = sum(rows[chunk] for side, chunk in needs if (side, chunk) not in held)
        if not groups or read + more > limit:
            groups.append([])
            held, read, more = set(), 0, sum(rows[chunk] for _, chunk in needs)
        held.update(needs)
        read += more
        groups[-1].append(pair)
    return groups
