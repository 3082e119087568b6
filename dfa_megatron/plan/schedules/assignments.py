"""Assign pairs (q_chunk, kv_chunk) to ranks and steps: balanced causal work, in ring order, or in few steps."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import Block, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.work import ROWS_PER_STEP


def balanced(mask: Mask, layout: Layout, *, share_last: bool = False) -> tuple[Block, ...]:
    """Return the blocks of DISTFLASHATTN (paper, Algorithm 2, corrected for odd P), in floor(P/2) + 1 steps.

    At step t rank r works for itself on the keys t ranks before it while there are any (r >= t), and otherwise helps
    rank r - t + P with its own keys. For even P the last step's pairs are met from above only: ranks below P/2 idle.

        P = 4     rank 0      rank 1      rank 2      rank 3      (rows of a rank, keys of a rank)
        step 0    (0, 0)      (1, 1)      (2, 2)      (3, 3)      own, causal
        step 1    (3, 0) *    (1, 0)      (2, 1)      (3, 2)      keys come from the rank before
        step 2    idle        idle        (2, 0)      (3, 1)      share_last: ranks 0 and 1 take half of each
        * helps: queries come from rank 3, and the partial result goes back.

    Args:
        mask: only causal pairs.
        layout: contiguous; halves of it to share the last step.
        share_last: for even P cut the last step's blocks in two by query rows, so that no rank idles. The owner takes
            the second half of its rows, and the otherwise idle helper the first. That step stays the last, so the
            results that travel behind no compute are half a chunk, not a whole one.
    """
    owner, ranks = layout.owner, layout.ranks
    queries = [layout.spans(rank, "q") for rank in range(ranks)]
    middle = [(spans[0].lo + spans[-1].hi) // 2 if spans else 0 for spans in queries]
    blocks: list[Block] = []
    for q, kv in needed_pairs(mask, layout.chunks):
        rows, keys = owner[q], owner[kv]
        if rows < keys:
            why = f"rows of rank {rows} see keys of rank {keys}, and it pairs causal work only"
            raise UnsupportedError("the balanced schedule on this mask", why, "schedule 'auto'")
        distance = rows - keys
        helps = 2 * distance > ranks
        if share_last and 2 * distance == ranks:
            helps = layout.chunks[q].lo < middle[rows]
        blocks.append(Block(ranks - distance, keys, q, kv) if helps else Block(distance, rows, q, kv))
    return tuple(blocks)


def by_distance(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in ring order: at step t, rank r computes its own rows against the chunks of rank r - t."""
    owner, ranks, needed = layout.owner, layout.ranks, needed_pairs(mask, layout.chunks)
    return tuple([Block((owner[q] - owner[kv]) % ranks, owner[q], q, kv) for q, kv in needed])


def by_memory(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in as few steps as each rank's remote work fills, for load_balanced tokens. Owners compute."""
    owned: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
    for q, kv in needed_pairs(mask, layout.chunks):
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
