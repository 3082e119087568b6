"""Choosing a schedule: `auto` is the first that suits the mask and the layout."""

from __future__ import annotations

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.mask import Mask
from dfa_megatron.plan.schedules import SCHEDULES, AttentionPlan, plan_named


def make_plan(mask: Mask, ranks: int, *, schedule: str = "auto", layout: str = "auto") -> AttentionPlan:
    """Plan a distributed attention.

    Raises:
        UnsupportedError: an unknown schedule, or one that does not suit the mask, the layout or the length.
    """
    if schedule != "auto":
        plan = plan_named(schedule, mask, ranks)
        if layout not in ("auto", plan.layout):
            raise UnsupportedError(
                f"schedule {schedule!r} on layout {layout!r}", f"it needs layout {plan.layout!r}", "schedule 'auto'"
            )
        return plan
    refusals = []
    for name, candidate in SCHEDULES.items():
        if layout in ("auto", candidate.layout):
            try:
                return plan_named(name, mask, ranks)
            except UnsupportedError as refusal:
                refusals.append(str(refusal))
    raise UnsupportedError(f"mask {mask.name} on layout {layout!r}", "; ".join(refusals) or "no schedule", "layout 'contiguous'")
