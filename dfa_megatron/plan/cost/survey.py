"""Survey the schedules before any is planned: which ones serve the mask, and how much work is on one rank at most."""

from __future__ import annotations

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.candidate import Candidate
from dfa_megatron.plan.language.components import components
from dfa_megatron.plan.language.ir import needed_pairs
from dfa_megatron.plan.language.layout import contiguous
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules import ALL, Schedule

EVEN = 1.05
"""Work of the most loaded rank over the mean up to which `greedy` is not tried."""


def survey(mask: Mask, ranks: int, layout: str) -> tuple[dict[Schedule, float], dict[Schedule, Candidate]]:
    """Return (the token pairs of the most loaded rank of each schedule that serves, the others with their refusals)."""
    most: dict[Schedule, float] = {}
    refused: dict[Schedule, Candidate] = {}
    for schedule in ALL:
        why = instead = ""
        if layout not in ("auto", schedule.layout):
            why = f"it needs layout {schedule.layout!r}"
        elif not (why := _needless(schedule, mask, ranks, most)):
            try:
                most[schedule] = schedule.most_loaded(mask, ranks)
            except UnsupportedError as error:
                why, instead = error.why, error.instead
        if why:
            refused[schedule] = Candidate(schedule.name, schedule.layout, refusal=why, instead=instead)
    return most, refused


def _needless(schedule: Schedule, mask: Mask, ranks: int, most: dict[Schedule, float]) -> str:
    """Return the reason why a schedule for packs cannot win beside those that serve, or an empty string."""
    if schedule.name == "balanced_shared" and not _has_far_pairs(mask, ranks):
        return "the last step of balanced has no work to share"
    has_zigzag = any(other.layout == "zigzag" for other in most)
    if schedule.layout == "load_balanced" and has_zigzag and len(components(mask)) == 1:
        return "there is one sequence, which zigzag balances"
    if schedule.name == "greedy":
        even = EVEN * mask.area
        for other, load in most.items():
            if other.layout == "contiguous" and load * ranks <= even:
                return f"the work of {other.name} is even"
    return ""


def _has_far_pairs(mask: Mask, ranks: int) -> bool:
    """Return whether rows see keys half of the ranks away, which `balanced_shared` shares, or True for odd ranks."""
    if ranks < 1 or ranks % 2 or mask.length % ranks:
        return True
    layout = contiguous(mask.length, ranks)
    return any(2 * (layout.owner[q] - layout.owner[kv]) == ranks for q, kv in needed_pairs(mask, layout))
