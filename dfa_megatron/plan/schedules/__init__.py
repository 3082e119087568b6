"""The schedules by name: a token layout, the chunks it is planned in, who computes what, and the route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, Block, Phase, Plan
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules.balanced import balanced, balanced_shared, owner_computes
from dfa_megatron.plan.schedules.greedy import greedy, own_rows
from dfa_megatron.plan.schedules.load_balanced import layout_of
from dfa_megatron.plan.schedules.route import Route, direct, gateway, ring_relay


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run an attention.

    layout: the tokens a rank must hold. chunks: the layout in which it is planned, which cuts the same tokens per rank.
    """

    name: str
    layout: str
    chunks: str
    assign: Callable[[Mask, Layout], tuple[Block, ...]]
    route: Route

    def plan(self, mask: Mask, ranks: int, phase: Phase, ranks_per_node: int | None = None) -> Plan:
        """The plan of one phase; with `ranks_per_node`, what crosses to another node crosses once.

        Raises:
            UnsupportedError: the mask or the length does not suit the schedule, or its route knows no nodes.
        """
        route = self.route
        if ranks_per_node is not None:
            if route is not direct:
                why = "its messages hop from rank to rank, and cross to a node once already"
                raise UnsupportedError(f"schedule {self.name!r} with a gateway", why, "the same without")
            route = gateway(ranks_per_node)
        layout = layout_of(self.chunks, mask, ranks)
        blocks = tuple(sorted(self.assign(mask, layout)))
        return Plan(mask, layout, phase, blocks, route(blocks, layout, phase))


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("balanced_shared", "contiguous", "halves", balanced_shared, direct),
        Schedule("balanced", "contiguous", "contiguous", balanced, direct),
        Schedule("zigzag", "zigzag", "zigzag", owner_computes, direct),
        Schedule("load_balanced", "load_balanced", "load_balanced", own_rows, direct),
        Schedule("ring", "contiguous", "contiguous", owner_computes, ring_relay),
        Schedule("greedy", "contiguous", "pieces", greedy, direct),
    )
}
"""In the order in which `auto` prefers them where their cost is equal."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A forward and the backward of the same schedule, mask and layout.

    ranks_per_node: of the nodes that its routes cross to once, or None where the routes know no nodes.
    """

    schedule: str
    layout: str
    forward: Plan
    backward: Plan
    ranks_per_node: int | None = None

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.forward.ranks

    @property
    def digest(self) -> str:
        """A short hash of both phases."""
        return f"{self.forward.digest}-{self.backward.digest}"

    def __str__(self) -> str:
        nodes = f", nodes of {self.ranks_per_node}" if self.ranks_per_node is not None else ""
        mask = self.forward.mask
        return f"{self.schedule} of {mask.name} over {mask.length} tokens on {self.ranks} ranks{nodes}"


def plan_named(name: str, mask: Mask, ranks: int, ranks_per_node: int | None = None) -> AttentionPlan:
    """Both phases of a schedule given by name; with `ranks_per_node`, what crosses to another node crosses once.

    Raises:
        UnsupportedError: no such schedule (the known ones are named), or it does not suit the mask or the length.
    """
    if name not in SCHEDULES:
        raise UnsupportedError(
            f"schedule {name!r}", "there is no such schedule", "one of auto, " + ", ".join(SCHEDULES)
        )
    schedule = SCHEDULES[name]
    if ranks < 1:
        raise UnsupportedError(f"a plan for {ranks} ranks", "there must be one at least", "ranks=1")
    forward, backward = (schedule.plan(mask, ranks, phase, ranks_per_node) for phase in (FORWARD, BACKWARD))
    return AttentionPlan(name, schedule.layout, forward, backward, ranks_per_node)
