"""Plans whose results do not depend on ranks: whole leaves on one rank each, and partials that travel as whole subtrees.

A rank's part of a result is seldom one subtree where ranks are no power of two. So a step is divided, and each part of
it completes one subtree of every result that it writes for another rank, which then leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import joined_spans
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, Block, Phase, Plan, Transfer, chunk_of
from dfa_megatron.plan.language.ir import loads, needed_pairs
from dfa_megatron.plan.language.layout import Layout, cut_at
from dfa_megatron.plan.language.leaves import Grid, Keys, LeafSizes, grid_of, subtrees
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules.assignments import balanced, by_distance, by_memory
from dfa_megatron.plan.schedules.route import direct

_ASSIGN = {
    "balanced_shared": partial(balanced, share_last=True),
    "balanced": balanced,
    "owner_computes": by_distance,
}
"""In the order in which "auto" prefers them where the most loaded rank has equal work."""


def invariant_plan(mask: Mask, held: Layout, leaves: LeafSizes, schedule: str = "auto") -> AttentionPlan:
    """Plan both phases so that results merge in the mask's own order. Equal arguments give equal plans.

    Args:
        mask: pairs of the whole sequence that attend.
        held: the tokens of each rank. The plan's layout gives each chunk to the rank that holds most of it.
        leaves: the sizes of chunks, which depend on the kernel, dtype and head_dim alone.
        schedule: "auto", "balanced" or "balanced_shared".

    Raises:
        UnsupportedError: the schedule keeps no fixed order, or does not suit the mask.
    """
    if schedule not in ("auto", *_ASSIGN):
        why = "its sums are merged on their way from rank to rank, or in parts of a leaf"
        instead = "schedule 'auto', 'balanced' or 'balanced_shared'"
        raise UnsupportedError(f"numerics='invariant' with schedule {schedule!r}", why, instead)
    grid = grid_of(mask, leaves)
    layout = whole_chunks(held, grid)
    if schedule == "auto":
        schedule, blocks = _evenest(mask, layout)
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


def _evenest(mask: Mask, layout: Layout) -> tuple[str, tuple[Block, ...]]:
    """Return the assignment whose most loaded rank has the least work, and its name."""
    found: list[tuple[int, str, tuple[Block, ...]]] = []
    for name, assign in _ASSIGN.items():
        if not layout.in_order and name != "owner_computes":
            continue
        try:
            blocks = (assign if layout.in_order else by_memory)(mask, layout)
        except UnsupportedError:  # rows see keys of later ranks
            continue
        found.append((max(loads(blocks, mask, layout)), name, blocks))
    _, name, blocks = min(found, key=lambda one: one[0])
    return name, blocks


def _phase(mask: Mask, layout: Layout, phase: Phase, blocks: Iterable[Block], leaves: LeafSizes) -> Plan:
    """Divide the steps where a rank would send what is no subtree, and send each subtree once it is whole."""
    every = _Leaves(mask, layout, phase, grid_of(mask, leaves))
    groups: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in sorted(blocks):
        groups[block.step, block.rank].append(block)
    parts = {place: every.parts(place[1], group) for place, group in groups.items()}
    first: dict[int, int] = {}
    end = 0
    for step in range(1 + max(step for step, _ in groups)):
        first[step] = end
        end += max((1 + max(its) for (at, _), its in parts.items() if at == step), default=1)
    divided = [
        block._replace(step=first[step] + part)
        for (step, rank), group in groups.items()
        for block, part in zip(group, parts[step, rank], strict=True)
    ]
    divided.sort()
    reads = [t for t in direct(divided, layout, phase) if t.what not in phase.write_names]
    results = {
        Transfer(block.step + 1, block.rank, layout.owner[chunk], name, chunk)
        for block in divided
        for side, name in phase.writes
        if layout.owner[chunk := chunk_of(block, side)] != block.rank
    }
    return Plan(mask, layout, phase, tuple(divided), tuple(sorted((*reads, *results))), leaves)


class _Leaves:
    """The leaves of every result of a phase, and how blocks of one rank and step make subtrees of them."""

    def __init__(self, mask: Mask, layout: Layout, phase: Phase, grid: Grid) -> None:
        self.layout, self.phase, self.grid = layout, phase, grid
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for q, kv in needed_pairs(mask, layout.chunks):
            for side, _ in phase.writes:
                mine, other = (q, kv) if side == "q" else (kv, q)
                found[side, mine].append(grid.key(other))
        self.every: dict[tuple[str, int], Keys] = {place: tuple(sorted(keys)) for place, keys in found.items()}

    def parts(self, rank: int, group: Sequence[Block]) -> list[int]:
        """Return the part of the step in which each block runs: one subtree of a result that leaves in each."""
        nodes = self._nodes(rank, group)
        joined = _classes(group, nodes)
        if any(len({of[at] for at in its if at in of}) > 1 for its in joined for of in nodes.values()):
            single = {place: {at: (number, number) for number, at in enumerate(of)} for place, of in nodes.items()}
            nodes, joined = single, [[at] for at in range(len(group))]  # a block at a time always makes subtrees
        found, taken = [0] * len(group), defaultdict[tuple[str, int], set[int]](set)
        for its in joined:
            places = [place for place, of in nodes.items() if any(at in of for at in its)]
            part = next(part for part in range(len(group)) if all(part not in taken[place] for place in places))
            for place in places:
                taken[place].add(part)
            for at in its:
                found[at] = part
        return found

    def _nodes(self, rank: int, group: Sequence[Block]) -> dict[tuple[str, int], dict[int, Keys]]:
        """Return, for each result that leaves, the subtree to which each block adds, by the block's place."""
        found: dict[tuple[str, int], dict[int, Keys]] = {}
        mine: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        for at, block in enumerate(group):
            for side, _ in self.phase.writes:
                chunk = chunk_of(block, side)
                if self.layout.owner[chunk] != rank:
                    mine[side, chunk][self.grid.key(chunk_of(block, "kv" if side == "q" else "q"))] = at
        for place, by_key in mine.items():
            nodes = subtrees(tuple(sorted(by_key)), self.every[place])
            found[place] = {by_key[key]: node for node in nodes for key in node}
        return found


def _classes(group: Sequence[Block], nodes: dict[tuple[str, int], dict[int, Keys]]) -> list[list[int]]:
    """Return the blocks that share a subtree, and so a part, in their order."""
    home = [*range(len(group))]

    def root(at: int) -> int:
        while home[at] != at:
            at = home[at]
        return at

    for of in nodes.values():
        first: dict[Keys, int] = {}
        for at, node in of.items():
            one, other = sorted((root(first.setdefault(node, at)), root(at)))
            home[other] = one
    found: dict[int, list[int]] = defaultdict(list)
    for at in range(len(group)):
        found[root(at)].append(at)
    return list(found.values())
