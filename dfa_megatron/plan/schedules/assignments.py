"""Assign pairs (q_chunk, kv_chunk) to ranks and steps: balanced causal work, in ring order, or in few steps."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import Block, areas, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.shape import GATHER, LAUNCH, ROW


def balanced(mask: Mask, layout: Layout, *, share_last: bool = False) -> tuple[Block, ...]:
    """Return the blocks of DISTFLASHATTN (paper, Algorithm 2, corrected for odd P), in floor(P/2) + 1 steps.

    At step t rank r works for itself on the keys t ranks before it while there are any (r >= t), and otherwise helps
    rank r - t + P with its own keys. For even P the last step's pairs are met from above only: ranks below P/2 idle.

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


def ordered(blocks: Sequence[Block], mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in the order of their steps; own keys wait for those that land for the same rows, where it pays.

    One kernel call then reads the rows once. It pays where reading them twice takes longer than to copy the keys, to
    wait for messages that less work is left to hide, another call where rows on both sides do not wait, and a share of
    the work that waits. So long documents keep their order, in which all messages are hidden.
    """
    if not layout.in_order or len(mask.tiles) < 2:
        return tuple(sorted(blocks))
    owner, rows, area = layout.owner, [len(chunk) for chunk in layout.chunks], areas(mask, layout.chunks)
    mine: list[list[Block]] = [[] for _ in range(layout.ranks)]
    for block in blocks:
        mine[block.rank].append(block)
    waits: dict[tuple[int, int], int] = {}
    for rank, its in enumerate(mine):
        landed = [block for block in its if owner[block.q_chunk] == rank != owner[block.kv_chunk]]
        step = min((block.step for block in landed), default=0)
        keys = {block.kv_chunk for block in landed if block.step == step}
        waiting = {block.q_chunk for block in landed if block.step == step}
        own = [block for block in its if block.q_chunk in waiting and owner[block.kv_chunk] == rank]
        before = sum(area[q, kv] for at, _, q, kv in its if at < step)
        less = sum(area[q, kv] for _, _, q, kv in own)
        landing = ARRIVAL + ARRIVAL_OF_KEY * sum(rows[kv] for kv in keys)
        shown = max(0, landing - before + less) - max(0, landing - before)
        copies = GATHER / HEADS_PER_KEY * sum(rows[kv] for kv in keys | {block.kv_chunk for block in own})
        left = {q for at, _, q, kv in its if at < step and owner[q] == rank and q not in waiting}
        torn = bool(left) and min(left) < max(waiting) and min(waiting) < max(left)
        if ROW * sum(rows[q] for q in waiting) > shown + copies + LATE * less + LAUNCH * torn:
            waits |= {(rank, q): step for q in waiting}
    if waits:
        late = [waits.get((rank, q), 0) if owner[kv] == rank else 0 for _, rank, q, kv in blocks]
        blocks = [one._replace(step=to) if to > one.step else one for one, to in zip(blocks, late, strict=True)]
    return tuple(sorted(blocks))


HEADS_PER_KEY = 4
"""Query heads of a kv head, as most models have."""

ARRIVAL, ARRIVAL_OF_KEY = 300_000, 240
"""Pairs of a query head that a kernel computes, forward and backward, while a message lands, and while a key does."""

LATE = 1 / 16
"""What work that waits costs, as a share of it."""

ROWS_PER_STEP = 2.0
"""Limit of remote rows and keys that a rank reads in one step, in rows of its own. It bounds memory."""


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
