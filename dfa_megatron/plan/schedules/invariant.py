"""Plans whose results do not depend on ranks: whole leaves on one rank, and partials that travel as whole subtrees.

A rank's part of a result is seldom one subtree where ranks are no power of two. So a step is divided, and each part of
it completes one subtree of every result that it writes for another rank, which then leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import joined_spans
from dfa_megatron.plan.language.ir import (
    BACKWARD,
    FORWARD,
    AttentionPlan,
    Block,
    Phase,
    Plan,
    Transfer,
    areas,
    chunk_of,
    loads,
    needed_pairs,
)
from dfa_megatron.plan.language.layout import Layout, cut_at
from dfa_megatron.plan.language.leaves import Grid, LeafSizes, grid_of, subtrees
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.work import EVEN
from dfa_megatron.plan.schedules.assignments import balanced, by_distance, by_memory, direct
from dfa_megatron.plan.schedules.load_balanced import dealt

_ASSIGN: Mapping[str, Callable[[Mask, Layout], tuple[Block, ...]]] = {
    "balanced_shared": partial(balanced, share_last=True),
    "balanced": balanced,
    "owner_computes": by_distance,
}
"""In the order in which "auto" prefers them where the most loaded rank has equal work."""


def invariant_plan(mask: Mask, held: Layout, leaves: LeafSizes, schedule: str = "auto") -> AttentionPlan:
    """Plan both phases so that results merge in the mask's own order. Equal arguments give equal plans.

    held: the tokens of each rank. The plan's layout gives each chunk to the rank that holds most of it.
    leaves: the sizes of chunks, which depend on the kernel, dtype and head_dim alone.
    """
    if schedule not in ("auto", *_ASSIGN):
        why = "its sums are merged on their way from rank to rank, or in parts of a leaf"
        instead = "schedule 'auto', 'balanced' or 'balanced_shared'"
        raise UnsupportedError(f"numerics='invariant' with schedule {schedule!r}", why, instead)
    grid = grid_of(mask, leaves)
    layout = whole_chunks(held, grid)
    if schedule == "auto":
        schedule, layout, blocks = _evenest(mask, layout)
    else:
        blocks = _ASSIGN[schedule](mask, layout)
    forward, backward = (_phase(mask, layout, phase, blocks, leaves) for phase in (FORWARD, BACKWARD))
    return AttentionPlan(schedule, "contiguous" if layout.in_order else "load_balanced", forward, backward)


def whole_chunks(held: Layout, grid: Grid) -> Layout:
    """Give every chunk of the grid to the rank that holds most of its tokens, the first of several."""
    most: list[Counter[int]] = [Counter() for _ in grid.chunks]
    pieces = cut_at(held, [edge for chunk in grid.chunks for edge in (chunk.lo, chunk.hi)])
    for piece, owner in zip(pieces.chunks, pieces.owner, strict=True):
        most[grid.at(piece.lo)][owner] += len(piece)
    owners = tuple(min(count, key=lambda rank: (-count[rank], rank)) for count in most)
    return Layout(grid.chunks, owners, held.ranks, held.queries)


def same_rows(one: Layout, other: Layout) -> bool:
    """Return whether every rank holds the same tokens in the same order in both."""
    return all(
        joined_spans(one.spans(rank, side)) == joined_spans(other.spans(rank, side))
        for rank in range(one.ranks)
        for side in ("q", "kv")
    )


def _evenest(mask: Mask, layout: Layout) -> tuple[str, Layout, tuple[Block, ...]]:
    """Return the assignment whose most loaded rank has the least work: its name, the chunks of each rank, its blocks.

    Where that is uneven, heavy chunks are dealt: of packs few move.
    """
    found: list[tuple[int, str, tuple[Block, ...]]] = []
    for name, assign in _ASSIGN.items():
        if not layout.in_order and name != "owner_computes":
            continue
        try:
            blocks = (assign if layout.in_order else by_memory)(mask, layout)
        except UnsupportedError:  # rows see keys of later ranks
            continue
        found.append((max(loads(blocks, mask, layout)), name, blocks))
    most, name, blocks = min(found, key=lambda one: one[0])
    work = [0] * len(layout.chunks)
    for (chunk, _), area in areas(mask, layout.chunks).items():
        work[chunk] += area
    if most > (1 + EVEN) * sum(work) / layout.ranks and layout.queries is None:
        lightest = sorted(range(len(work)), key=work.__getitem__)
        other = replace(layout, owner=tuple(dealt(work, layout.owner, layout.ranks, lightest)))
        owned = by_memory(mask, other)
        if max(loads(owned, mask, other)) < most:
            return "owner_computes", other, owned
    return name, layout, blocks


def _phase(mask: Mask, layout: Layout, phase: Phase, blocks: Sequence[Block], leaves: LeafSizes) -> Plan:
    """Divide the steps where a rank would send what is no subtree, and send each subtree once it is whole."""
    grid, owner = grid_of(mask, leaves), layout.owner
    every: dict[tuple[str, int], list[int]] = defaultdict(list)
    for q, kv in needed_pairs(mask, layout.chunks):
        every["q", q].append(grid.key(kv))
        every["kv", kv].append(grid.key(q))
    # The leaves of each result that a rank writes for another in a step; a block writes one of these at most.
    away: dict[tuple[int, int, str, int], dict[int, Block]] = defaultdict(dict)
    for block in blocks:
        for (side, _), mine, other in zip(phase.writes, block[2:], block[:1:-1], strict=False):
            if owner[mine] != block.rank:
                away[block.step, block.rank, side, mine][grid.key(other)] = block
    part, width = dict[Block, int](), Counter[int]()
    for (step, _, side, chunk), by_key in away.items():
        nodes = subtrees(tuple(sorted(by_key)), tuple(sorted(every[side, chunk])))
        part |= {by_key[key]: number for number, node in enumerate(nodes) for key in node}
        width[step] = max(width[step], len(nodes))
    steps = range(1 + max(block.step for block in blocks))
    first = [*accumulate((max(1, width[step]) for step in steps), initial=0)]
    divided = tuple(sorted(block._replace(step=first[block.step] + part.get(block, 0)) for block in blocks))
    reads = [t for t in direct(divided, layout, phase) if t.what not in phase.write_names]
    results = {
        Transfer(block.step + 1, block.rank, owner[chunk], name, chunk)
        for block in divided
        for side, name in phase.writes
        if owner[chunk := chunk_of(block, side)] != block.rank
    }
    return Plan(mask, layout, phase, divided, tuple(sorted((*reads, *results))), leaves)
