"""Owner-computes schedules, in which every rank computes its own rows: the ring, and layouts that balance work by
tokens.
"""

from __future__ import annotations

from dfa_megatron.plan.language.ir import Block, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules.step_order import assign_steps


def by_distance(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in ring order: at step t, rank r computes its own rows against the chunks of rank r - t."""
    ranks, needed = layout.ranks, needed_pairs(mask, layout)
    return tuple(
        Block(step, rank, q, kv)
        for step in range(ranks)
        for rank in range(ranks)
        for q in layout.of(rank)
        for kv in layout.of((rank - step) % ranks)
        if (q, kv) in needed
    )


def by_memory(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in as few steps as each rank's remote work fills, for load_balanced tokens. Owners compute."""
    owned: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
    for q, kv in needed_pairs(mask, layout):
        owned[layout.owner[q]].append((q, kv))
    return assign_steps(owned, mask, layout)
