"""Choosing a schedule: `auto` is the cheapest, by simulation, of those that suit the mask, the layout and the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost import AttentionShape, simulate
from dfa_megatron.plan.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.mask import Mask
from dfa_megatron.plan.schedules import SCHEDULES, AttentionPlan, plan_named

TIE = 0.02
"""Makespans closer than this share are equal: the order of SCHEDULES decides what the model cannot."""


TOKEN_LAYOUTS = tuple(dict.fromkeys(schedule.layout for schedule in SCHEDULES.values()))
"""The layouts of tokens that some schedule works on."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that `auto` looked at: its plan and simulated seconds, or why it cannot serve and what it could."""

    schedule: str
    plan: AttentionPlan | None = None
    seconds: float = 0.0
    refusal: str = ""
    instead: str = ""


def make_plan(
    mask: Mask,
    ranks: int,
    *,
    schedule: str = "auto",
    layout: str = "auto",
    shape: AttentionShape | None = None,
    hardware: Hardware | None = None,
) -> AttentionPlan:
    """Plan a distributed attention. Equal arguments give an equal plan on every rank.

    Args:
        mask: which pairs of the whole sequence attend.
        ranks: how many ranks share it.
        schedule: a name of SCHEDULES, or "auto".
        layout: the tokens that a rank holds, one of TOKEN_LAYOUTS, or "auto" for whatever the schedule needs.
        shape, hardware: what `auto` compares costs for; None is 32 heads of 128 in 16 bits on H200s of one host.

    Raises:
        UnsupportedError: an unknown name, or nothing suits; the message has every refusal.
    """
    return _make_plan(mask, ranks, schedule, layout, shape or AttentionShape(), hardware or H200_NVLINK)


@lru_cache(maxsize=128)
def _make_plan(
    mask: Mask, ranks: int, schedule: str, layout: str, shape: AttentionShape, hardware: Hardware
) -> AttentionPlan:
    if layout != "auto" and layout not in TOKEN_LAYOUTS:
        raise UnsupportedError(
            f"layout {layout!r}", "there is no such layout", "one of auto, " + ", ".join(TOKEN_LAYOUTS)
        )
    if schedule != "auto":
        plan = plan_named(schedule, mask, ranks)
        if layout not in ("auto", plan.layout):
            raise UnsupportedError(
                f"schedule {schedule!r} on layout {layout!r}", f"it needs layout {plan.layout!r}", "schedule 'auto'"
            )
        return plan
    looked_at = candidates(mask, ranks, layout=layout, shape=shape, hardware=hardware)
    served = [(candidate.seconds, candidate.plan) for candidate in looked_at if candidate.plan]
    if not served:
        what = f"mask {mask.name} over {mask.length} tokens on {ranks} ranks in layout {layout!r}"
        instead = dict.fromkeys(candidate.instead for candidate in looked_at if candidate.instead)
        raise UnsupportedError(what, f"no schedule suits ({_refusals(looked_at)})", "; ".join(instead))
    best = min(seconds for seconds, _ in served)
    return next(plan for seconds, plan in served if seconds <= best * (1 + TIE))


def candidates(
    mask: Mask,
    ranks: int,
    *,
    layout: str = "auto",
    shape: AttentionShape | None = None,
    hardware: Hardware | None = None,
) -> tuple[Candidate, ...]:
    """Every schedule with its cost or the reason why it cannot serve, in the order of SCHEDULES."""
    looked_at = []
    for name, schedule in SCHEDULES.items():
        if layout not in ("auto", schedule.layout):
            looked_at.append(Candidate(name, refusal=f"it needs layout {schedule.layout!r}"))
            continue
        try:
            plan = plan_named(name, mask, ranks)
        except UnsupportedError as error:
            looked_at.append(Candidate(name, refusal=error.why, instead=error.instead))
            continue
        looked_at.append(Candidate(name, plan, simulate(plan, shape, hardware or H200_NVLINK).makespan))
    return tuple(looked_at)


def _refusals(looked_at: tuple[Candidate, ...]) -> str:
    """Every refusal, with the schedules that share a reason named together."""
    reasons: dict[str, list[str]] = {}
    for candidate in looked_at:
        reasons.setdefault(candidate.refusal, []).append(candidate.schedule)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
