"""The schedules: the chunks of the tokens, the assignment of blocks to ranks and steps, and the route of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, Block, Plan, needed_pairs
from dfa_megatron.plan.language.layout import Layout, by_name, cross, cut_at
from dfa_megatron.plan.language.mask import Mask, kept_on_mask
from dfa_megatron.plan.language.work import CUTS, WORTH_CUTTING
from dfa_megatron.plan.schedules.assignments import Route, balanced, by_distance, by_memory, direct, gateway, ring_relay
from dfa_megatron.plan.schedules.greedy import cut_for_help, greedy


def layout_of(name: str, mask: Mask, ranks: int) -> Layout:
    """Return the layout of that name for a mask. Only `load_balanced` depends on more of the mask than its lengths."""
    if mask.queries is not None:
        return cross(by_name(name, mask.queries, ranks), by_name(name, mask.length - mask.queries, ranks))
    if name != "load_balanced":
        return by_name(name, mask.length, ranks)
    from dfa_megatron.plan.schedules.load_balanced import load_balanced  # which other layouts need not load

    return load_balanced(mask.balanced_by or mask, ranks)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run an attention.

    Attributes:
        name: what users write; `owner_computes` follows from the layout, and nobody writes it.
        layout: the tokens that a rank must hold.
        halved: whether it is planned in halves of the layout's chunks.
        assign: who computes which block, and when.
        route: how data reach the blocks, and results their owners.
        cut: cuts chunks further, so that work is even; None where chunks stay as they are.
    """

    name: str
    layout: str
    halved: bool
    assign: Callable[[Mask, Layout], tuple[Block, ...]]
    route: Route
    cut: Callable[[Mask, Layout], Layout] | None = None

    def plan(self, mask: Mask, ranks: int, held: Layout | None = None) -> AttentionPlan:
        """Plan both phases, or refuse a mask or a length. held: the tokens of each rank; None: as the layout says."""
        if ranks < 1:
            raise UnsupportedError(f"a plan for {ranks} ranks", "there must be at least one", "ranks=1")
        layout = layout_of(self.layout, mask, ranks) if held is None else held
        layout = _cut_where_needed(mask, layout.halved() if self.halved else layout)
        layout = self.cut(mask, layout) if self.cut else layout
        forward, backward = _phases(mask, layout, tuple(sorted(self.assign(mask, layout))), self.route)
        return AttentionPlan(self.name, self.layout, forward, backward)


def _phases(mask: Mask, layout: Layout, blocks: tuple[Block, ...], route: Route) -> list[Plan]:
    return [Plan(mask, layout, phase, blocks, route(blocks, layout, phase)) for phase in (FORWARD, BACKWARD)]


def over_nodes(plan: AttentionPlan, ranks_per_node: int) -> AttentionPlan:
    """Return a plan of the route `direct` with data that crosses to another node crossing once.

    Messages of other routes hop from rank to rank, and cross to a node once already.
    """
    forward, backward = (
        replace(phase, transfers=gateway(phase.transfers, phase.layout, phase.phase, ranks_per_node))
        for phase in plan.phases
    )
    return replace(plan, forward=forward, backward=backward, ranks_per_node=ranks_per_node)


@kept_on_mask
def _cut_where_needed(mask: Mask, layout: Layout) -> Layout:
    """Cut chunks where the rows end that another rank's rows or keys meet: only these travel.

    A document that reaches over ranks needs its own rows, and a window the last rows of a chunk. Chunks stay whole
    where cuts are many or save few rows, because planning would take longer than the messages that they save.
    """
    edges, whole, saved = set[int](), 0, 0
    for (q, kv), tiles in needed_pairs(mask, layout.chunks).items():
        if layout.owner[q] != layout.owner[kv]:
            chunks = layout.chunks[q], layout.chunks[kv]
            whole += len(chunks[0]) + len(chunks[1])
            if tiles[0][:2] == chunks:
                continue  # all rows of both are needed
            for chunk, spans in zip(chunks, ([tile.q for tile in tiles], [tile.kv for tile in tiles]), strict=True):
                end = chunk.lo
                for lo, hi in sorted([(span.lo, span.hi) for span in spans]):
                    saved, end = saved + max(0, lo - end), max(end, hi)
                    edges.update((lo, hi))
                saved += chunk.hi - end
    if saved < WORTH_CUTTING * whole:
        return layout
    finer = cut_at(layout, edges)
    return finer if len(finer.chunks) - len(layout.chunks) <= CUTS * layout.ranks else layout


ALL = (
    Schedule("balanced_shared", "contiguous", True, partial(balanced, share_last=True), direct),
    Schedule("balanced", "contiguous", False, balanced, direct),
    Schedule("owner_computes", "zigzag", False, by_distance, direct),
    Schedule("owner_computes", "load_balanced", False, by_memory, direct),
    Schedule("ring", "contiguous", False, by_distance, ring_relay),
    Schedule("greedy", "contiguous", False, greedy, direct, cut_for_help),
)
"""In the order in which "auto" prefers them where their cost is equal."""

SCHEDULES = {schedule.name: schedule for schedule in ALL if schedule.layout == "contiguous"}
"""By name: the schedules that a user can choose, on contiguous tokens."""

OWNER_COMPUTES = {schedule.layout: schedule for schedule in ALL if schedule.layout != "contiguous"}
"""By layout: the one schedule of a layout that balances work by its tokens. Every rank computes its own rows."""


def with_blocks(plan: AttentionPlan, blocks: Iterable[Block]) -> AttentionPlan:
    """Return a plan of the same mask and layout that computes these blocks, forward and backward.

    Blocks are those of all ranks, and transfers are routed again. Check the result with `check_plan`: blocks may be
    missing, or twice.
    """
    changed = tuple(sorted(blocks))
    forward, backward = _phases(plan.forward.mask, plan.forward.layout, changed, direct)
    custom = AttentionPlan("custom", plan.layout, forward, backward)
    return custom if plan.ranks_per_node is None else over_nodes(custom, plan.ranks_per_node)
