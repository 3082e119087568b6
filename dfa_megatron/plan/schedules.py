"""The schedules by name: a token layout, the chunks it is planned in, who computes what, and the route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.assign import balanced, balanced_shared, owner_computes
from dfa_megatron.plan.deal import layout_of
from dfa_megatron.plan.greedy import greedy, own_rows
from dfa_megatron.plan.ir import BACKWARD, FORWARD, Block, Phase, Plan, Transfer
from dfa_megatron.plan.layout import Layout
from dfa_megatron.plan.mask import Mask
from dfa_megatron.plan.route import direct, ring_relay


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run an attention.

    layout: the tokens a rank must hold. chunks: the layout in which it is planned, which cuts the same tokens per rank.
    """

    name: str
    layout: str
    chunks: str
    assign: Callable[[Mask, Layout], tuple[Block, ...]]
    route: Callable[[tuple[Block, ...], Layout, Phase], tuple[Transfer, ...]]

    def plan(self, mask: Mask, ranks: int, phase: Phase) -> Plan:
        """The plan of one phase.

        Raises:
            UnsupportedError: the mask or the length does not suit the schedule.
        """
        layout = layout_of(self.chunks, mask, ranks)
        blocks = self.assign(mask, layout)
        return Plan(mask, layout, phase, tuple(sorted(blocks)), self.route(blocks, layout, phase))


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("balanced_shared", "contiguous", "halves", balanced_shared, direct),
        Schedule("balanced", "contiguous", "contiguous", balanced, direct),
        Schedule("zigzag", "zigzag", "zigzag", owner_computes, direct),
        Schedule("dealt", "dealt", "dealt", own_rows, direct),
        Schedule("ring", "contiguous", "contiguous", owner_computes, ring_relay),
        Schedule("greedy", "contiguous", "pieces", greedy, direct),
    )
}
"""In the order in which `auto` prefers them where their cost is equal."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A forward and the backward of the same schedule, mask and layout."""

    schedule: str
    layout: str
    forward: Plan
    backward: Plan

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.forward.ranks

    @property
    def digest(self) -> str:
        """A short hash of both phases."""
        return f"{self.forward.digest}-{self.backward.digest}"

    def __str__(self) -> str:
        return (
            f"{self.schedule} of {self.forward.mask.name} over {self.forward.mask.length} tokens on {self.ranks} ranks"
        )


def plan_named(name: str, mask: Mask, ranks: int) -> AttentionPlan:
    """Both phases of a schedule given by name.

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
    return AttentionPlan(
        name, schedule.layout, schedule.plan(mask, ranks, FORWARD), schedule.plan(mask, ranks, BACKWARD)
    )
