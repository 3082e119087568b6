"""Choose a schedule. `auto` is the cheapest by simulation among those that suit the mask, the layout and the ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS
from dfa_megatron.plan.cost.candidate import TIE, Candidate, best
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.cost.outline import estimate, outline
from dfa_megatron.plan.cost.simulate import bytes_sent, simulate
from dfa_megatron.plan.cost.survey import survey
from dfa_megatron.plan.language.components import components
from dfa_megatron.plan.language.heads import split_heads
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, loads
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.schedules import ALL, OWNER_COMPUTES, SCHEDULES, Schedule, plan_named
from dfa_megatron.plan.schedules.route import direct

EXCHANGES = 4
"""All-to-alls of a degree above 1: before and after a forward and a backward."""

COPIED = 180e9
"""Bytes per second that an exchange brings to a plan of several ranks, which reads a copy in order. Measured: degree 2
on four ranks in benchmarks/results/2026-11-21-4xh200-ulysses-flash4.json.
"""

MANY_RANKS = 16
"""Above this many ranks plans are estimated by `outline`, which is seconds faster and a few per cent less exact."""

MANY_TILES = 4
"""Above this many tiles schedules are estimated, because a pack comes with every batch; or they are left out where
their work alone takes longer. The estimate is optimistic when a step has many small tiles. So where layouts are
compared, which costs more to get wrong, the winner is fully simulated.
"""


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
        mask: pairs of the whole sequence that attend.
        ranks: number of ranks that share the sequence.
        schedule: a name of SCHEDULES, or "auto". Layouts other than contiguous allow "auto" only.
        layout: the tokens that a rank holds, one of LAYOUTS, or "auto". With "auto" a named schedule uses contiguous;
            schedule "auto" compares all layouts.
        shape, hardware: the basis of the costs that `auto` compares. None is 32 heads of 128 in 16 bits on H200s of one
            host. On hardware of several nodes a named schedule crosses to a node once if its route can.

    Raises:
        UnsupportedError: an unknown name, or no schedule suits; the message lists every refusal.
    """
    return _make_plan(mask, ranks, schedule, layout, shape or AttentionShape(), hardware or H200_NVLINK)


@lru_cache(maxsize=16)
def _make_plan(
    mask: Mask, ranks: int, schedule: str, layout: str, shape: AttentionShape, hardware: Hardware
) -> AttentionPlan:
    if layout != "auto" and layout not in LAYOUTS:
        raise UnsupportedError(f"layout {layout!r}", "there is no such layout", "one of auto, " + ", ".join(LAYOUTS))
    if schedule != "auto":
        if layout not in ("auto", "contiguous"):
            what = f"schedule {schedule!r} on layout {layout!r}"
            raise UnsupportedError(what, "there every rank computes its own rows", "schedule 'auto'")
        nodes = _nodes(hardware, ranks)
        routed = schedule in SCHEDULES and SCHEDULES[schedule].route is direct
        return plan_named(schedule, mask, ranks, nodes if routed else None)
    if layout in OWNER_COMPUTES and _nodes(hardware, ranks) is None:
        with suppress(UnsupportedError):  # it is the only candidate
            return OWNER_COMPUTES[layout].plan(mask, ranks)
    looked_at = candidates(mask, ranks, layout=layout, shape=shape, hardware=hardware)
    taken = best(looked_at)
    if taken is None or taken.plan is None:
        what = f"mask {mask.name} over {mask.length} tokens on {ranks} ranks in layout {layout!r}"
        instead = dict.fromkeys(candidate.instead for candidate in looked_at if candidate.instead)
        raise UnsupportedError(what, f"no schedule suits ({_refusals(looked_at)})", "; ".join(instead))
    return taken.plan


def automatic_degree(
    mask: Mask, ranks: int, *, schedule: str, layout: str, shape: AttentionShape, hardware: Hardware
) -> int:
    """Return the number of neighbours that exchange heads for ulysses_degree="auto".

    It is the degree of the first candidate within TIE of the cheapest, so 1 wins a tie. Several documents always give
    1, because they send little, and a schedule that is named runs over all ranks.
    """
    if schedule != "auto" or len(components(mask)) > 1:
        return 1
    looked_at = candidates(mask, ranks, layout=layout, shape=shape, hardware=hardware)
    if (least := best(looked_at)) is None:
        return 1
    for degree in _degrees(ranks, shape):
        if _least_seconds(mask, ranks, shape, hardware, degree) < least.seconds:
            looked_at += tuple(_with_ulysses(mask, ranks, layout, shape, hardware, degree, kept=True))
    taken = best(looked_at)
    return taken.ulysses_degree if taken is not None else 1


def _degrees(ranks: int, shape: AttentionShape) -> list[int]:
    return [d for d in range(2, ranks + 1) if ranks % d == 0 and shape.heads % d == 0]


def _least_seconds(mask: Mask, ranks: int, shape: AttentionShape, hardware: Hardware, degree: int) -> float:
    """Return a time below that of every plan with a degree: its exchanges, and even work at the highest rate."""
    seconds, _ = _exchange_seconds(mask, ranks, shape, hardware, degree, kept=True)
    return seconds + _compute_seconds(mask.area / ranks, shape, hardware)


def _compute_seconds(pairs: float, shape: AttentionShape, hardware: Hardware) -> float:
    """Return the time of a forward and a backward over so many token pairs at the highest rate."""
    phases = (FORWARD, hardware.forward), (BACKWARD, hardware.backward)
    return sum(pairs * shape.flops_per_pair(phase) / max(rate for _, rate in curve) for phase, curve in phases)


def candidates(
    mask: Mask,
    ranks: int,
    *,
    layout: str = "auto",
    shape: AttentionShape | None = None,
    hardware: Hardware | None = None,
    degrees: bool = False,
    kept: bool = False,
) -> tuple[Candidate, ...]:
    """Return every schedule with its cost or its refusal, in the order of `schedules.ALL`.

    On hardware of several nodes a schedule comes with and without gateways.

    Args:
        mask, ranks, layout, shape, hardware: as for `make_plan`.
        degrees: append every degree of Ulysses that divides ranks and heads, for one sequence.
        kept: with Ulysses, the backward reuses the exchanged q, k, v where it can; nothing is rematerialized.
    """
    shape, hardware = shape or AttentionShape(), hardware or H200_NVLINK
    looked_at = list(_of_schedules(mask, ranks, layout, shape, hardware))
    if degrees and len(components(mask)) == 1:
        for degree in _degrees(ranks, shape):
            looked_at += _with_ulysses(mask, ranks, layout, shape, hardware, degree, kept)
    return tuple(looked_at)


@lru_cache(maxsize=16)
def _of_schedules(
    mask: Mask, ranks: int, layout: str, shape: AttentionShape, hardware: Hardware
) -> tuple[Candidate, ...]:
    """Return candidates without an exchange; the choice of a degree and of a schedule both ask for them."""
    nodes, is_pack = _nodes(hardware, ranks), len(mask.tiles) > MANY_TILES
    cost = _simulated if ranks <= MANY_RANKS and not is_pack else _outlined
    most, refused = survey(mask, ranks, layout)
    found: dict[Schedule, list[Candidate]] = {schedule: [one] for schedule, one in refused.items()}
    least = math.inf
    for schedule in sorted(most, key=most.__getitem__):  # the most even first: its time may show that others lose
        if is_pack and _compute_seconds(most[schedule], shape, hardware) > least * (1 + TIE):
            why = "its most loaded rank computes for longer than another schedule takes"
            found[schedule] = [Candidate(schedule.name, schedule.layout, refusal=why)]
            continue
        plans = [schedule.plan(mask, ranks)]
        if nodes is not None and schedule.route is direct:
            plans.append(schedule.plan(mask, ranks, nodes))
        found[schedule] = [cost(plan, shape, hardware) for plan in plans]
        least = min(least, *(one.seconds for one in found[schedule]))
    looked_at = [one for schedule in ALL for one in found[schedule]]
    simulates = ranks <= MANY_RANKS and not (is_pack and layout != "auto")
    while simulates and (taken := best(tuple(looked_at))) and taken.plan and not taken.simulated:
        looked_at[looked_at.index(taken)] = _simulated(taken.plan, shape, hardware)
    return tuple(looked_at)


def imbalance(plan: AttentionPlan) -> float:
    """Return the work of the most loaded rank over the mean, in token pairs."""
    load = loads(plan.forward.blocks, plan.forward.mask, plan.forward.layout)
    return max(load) * plan.ranks / max(1, sum(load))


def _outlined(plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> Candidate:
    parts = [estimate(outline(phase, shape.batch), shape, hardware) for phase in plan.phases]
    device, host = sum(part.seconds for part in parts), sum(part.host_seconds for part in parts)
    busy, sent = sum((1 - part.idle_share) * part.seconds for part in parts), max(bytes_sent(plan, shape))
    return Candidate(plan.schedule, plan.layout, plan, device=device, host=host, busy=busy, sent=sent)


def _simulated(plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> Candidate:
    run = simulate(plan, shape, hardware, events=False)
    slots = max(len(program.slots) for phase in plan.phases for program in lower_all(phase, shape.batch))
    found = Candidate(plan.schedule, plan.layout, plan, device=run.makespan, host=max(run.host), sent=max(run.sent))
    return replace(found, busy=sum(run.busy) / len(run.busy), slots=slots, simulated=True)


def _with_ulysses(
    mask: Mask, ranks: int, layout: str, shape: AttentionShape, hardware: Hardware, degree: int, kept: bool
) -> list[Candidate]:
    """Return candidates with fewer ranks per plan: `degree` neighbours exchange heads for tokens around it."""
    split = split_heads(degree, ranks, shape.heads, shape.kv_heads)
    exchange, sent = _exchange_seconds(mask, ranks, shape, hardware, degree, kept=kept)
    inner = hardware.inside(degree)
    found = []
    for one in _of_schedules(mask, ranks // degree, layout, split.shape(shape), inner):
        if one.layout == "load_balanced":
            why = "neighbours do not hold the tokens that one rank of its plan would"
            one = Candidate(one.schedule, one.layout, refusal=why)
        elif one.plan:
            host = one.host + EXCHANGES * hardware.host.exchange
            one = replace(one, device=one.device + exchange, host=host, sent=one.sent + sent)
        found.append(replace(one, ulysses_degree=degree))
    # With one rank per plan every schedule is the same.
    return found if degree < ranks else [one for one in found if one.plan][:1]


def _exchange_seconds(
    mask: Mask, ranks: int, shape: AttentionShape, hardware: Hardware, degree: int, *, kept: bool
) -> tuple[float, int]:
    """Return (seconds, bytes that a rank sends) of all exchanges of a forward and a backward; no compute overlaps."""
    split = split_heads(degree, ranks, shape.heads, shape.kv_heads)
    nbytes = split.exchanges(shape, mask.length // ranks, kept=kept)
    copied = sum(nbytes) / COPIED if degree < ranks else 0.0
    return copied + sum(hardware.seconds_of_exchange(degree, each) for each in nbytes), sum(nbytes)


def _nodes(hardware: Hardware, ranks: int) -> int | None:
    """Return the ranks per node if there are several nodes, else None."""
    nodes = hardware.ranks_per_node
    return nodes if nodes is not None and nodes < ranks else None


def _refusals(looked_at: tuple[Candidate, ...]) -> str:
    """Format every refusal; schedules with the same reason are named together."""
    reasons: dict[str, list[str]] = {}
    for candidate in looked_at:
        reasons.setdefault(candidate.refusal, []).append(candidate.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
