"""Choose a schedule. `auto` is the cheapest by simulation among those that suit the mask, the layout and the ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.cost.outline import estimate, outline
from dfa_megatron.plan.cost.simulate import bytes_sent, simulate
from dfa_megatron.plan.language.components import components
from dfa_megatron.plan.language.heads import split_heads
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.schedules import ALL, SCHEDULES, plan_named
from dfa_megatron.plan.schedules.route import direct

TIE = 0.02
"""Plans whose makespans differ by less than this share are a tie. The order of `schedules.ALL` decides a tie."""

EVEN = 1.05
"""Work of the most loaded rank over the mean up to which `greedy` is not tried."""

WAITING, MARGIN = 0.25, 0.1
"""Conditions of ulysses_degree="auto" for a head exchange. Over NVLink the simulated idle share is under a quarter, and
an exchange was measured to be slower. MARGIN is there because all-to-alls are not overlapped.
"""

MANY_RANKS = 16
"""Above this many ranks plans are estimated by `outline`, which is seconds faster and a few per cent less exact."""

MANY_TILES = 4
"""Above this many tiles only the winner is fully simulated, because a pack comes with every batch. The others use the
fast estimate, which is optimistic when a step has many small tiles.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of `auto`: its plan and its cost, or the reason for its refusal.

    seconds, idle_share: of forward and backward together. sent: the most bytes that one rank sends in both phases.
    slots: the most buffers of one rank in either phase. simulated: True by `simulate`; False by `outline`, where slots
    is 0.
    ulysses_degree: number of neighbours that exchange heads around the plan; `seconds` and `sent` include the exchange.
    refusal, instead: set in place of a plan; the reason, and an alternative.
    """

    schedule: str
    layout: str = "contiguous"
    plan: AttentionPlan | None = None
    seconds: float = 0.0
    refusal: str = ""
    instead: str = ""
    idle_share: float = 0.0
    sent: int = 0
    slots: int = 0
    simulated: bool = False
    ulysses_degree: int = 1

    @property
    def name(self) -> str:
        """Return the schedule, a layout other than contiguous, "gateway" if its route knows nodes, a degree above 1."""
        where = f" on {self.layout}" if self.layout != "contiguous" else ""
        nodes = ", gateway" if self.plan is not None and self.plan.ranks_per_node is not None else ""
        degree = f", ulysses {self.ulysses_degree}" if self.ulysses_degree > 1 else ""
        return f"{self.schedule}{where}{nodes}{degree}"


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


@lru_cache(maxsize=128)
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
    looked_at = candidates(mask, ranks, layout=layout, shape=shape, hardware=hardware)
    taken = best(looked_at)
    if taken is None or taken.plan is None:
        what = f"mask {mask.name} over {mask.length} tokens on {ranks} ranks in layout {layout!r}"
        instead = dict.fromkeys(candidate.instead for candidate in looked_at if candidate.instead)
        raise UnsupportedError(what, f"no schedule suits ({_refusals(looked_at)})", "; ".join(instead))
    return taken.plan


def best(looked_at: tuple[Candidate, ...]) -> Candidate | None:
    """Return the first candidate within TIE of the cheapest, or None if every candidate is refused."""
    served = [candidate for candidate in looked_at if candidate.plan]
    least = min((candidate.seconds for candidate in served), default=0.0)
    return next((candidate for candidate in served if candidate.seconds <= least * (1 + TIE)), None)


def automatic_degree(
    mask: Mask, ranks: int, *, schedule: str, layout: str, shape: AttentionShape, hardware: Hardware
) -> int:
    """Return the number of neighbours that exchange heads for ulysses_degree="auto".

    A degree above 1 has two conditions. Ranks wait for more than WAITING of the time without an exchange, and the
    simulation with one is faster by more than MARGIN. Several documents always give 1, because they send little.
    """
    if len(components(mask)) > 1:
        return 1

    def fastest(degrees: bool) -> Candidate | None:
        looked_at = candidates(mask, ranks, layout=layout, shape=shape, hardware=hardware, degrees=degrees)
        return best(tuple(one for one in looked_at if schedule in ("auto", one.schedule)))

    without = fastest(degrees=False)
    if without is None or without.idle_share <= WAITING:
        return 1
    taken = fastest(degrees=True)
    return taken.ulysses_degree if taken is not None and taken.seconds < (1 - MARGIN) * without.seconds else 1


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
        degrees: append every degree of Ulysses that divides ranks and heads.
        kept: with Ulysses, the backward reuses the exchanged q, k, v where it can; nothing is rematerialized.
    """
    shape, hardware = shape or AttentionShape(), hardware or H200_NVLINK
    looked_at = _of_schedules(mask, ranks, layout, shape, hardware)
    if degrees:
        for degree in (d for d in range(2, ranks + 1) if ranks % d == 0 and shape.heads % d == 0):
            looked_at += _with_ulysses(mask, ranks, layout, shape, hardware, degree, kept)
    return tuple(looked_at)


def _of_schedules(mask: Mask, ranks: int, layout: str, shape: AttentionShape, hardware: Hardware) -> list[Candidate]:
    looked_at: list[Candidate] = []
    nodes = _nodes(hardware, ranks)
    cost = _simulated if ranks <= MANY_RANKS and len(mask.tiles) <= MANY_TILES else _outlined
    for schedule in ALL:
        without = Candidate(schedule.name, schedule.layout)
        if layout not in ("auto", schedule.layout):
            looked_at.append(replace(without, refusal=f"it needs layout {schedule.layout!r}"))
            continue
        if why := _needless(without, mask, looked_at):
            looked_at.append(replace(without, refusal=why))
            continue
        try:
            plans = [schedule.plan(mask, ranks)]
        except UnsupportedError as error:
            looked_at.append(replace(without, refusal=error.why, instead=error.instead))
            continue
        if nodes is not None and schedule.route is direct:
            plans.append(schedule.plan(mask, ranks, nodes))
        looked_at += [cost(plan, shape, hardware) for plan in plans]
    while ranks <= MANY_RANKS and (taken := best(tuple(looked_at))) and taken.plan and not taken.simulated:
        looked_at[looked_at.index(taken)] = _simulated(taken.plan, shape, hardware)
    return looked_at


def _needless(one: Candidate, mask: Mask, looked_at: list[Candidate]) -> str:
    """Return the reason why a schedule for packs cannot win here, or an empty string."""
    served = [candidate for candidate in looked_at if candidate.plan]
    if one.layout == "load_balanced" and any(c.layout == "zigzag" for c in served) and len(components(mask)) == 1:
        return "there is one sequence, which zigzag balances"
    if one.schedule == "greedy":
        for candidate in served:
            if candidate.plan and candidate.plan.layout == "contiguous" and imbalance(candidate.plan) <= EVEN:
                return f"the work of {candidate.schedule} is even"
    return ""


def imbalance(plan: AttentionPlan) -> float:
    """Return the work of the most loaded rank over the mean, in token pairs."""
    load: dict[int, int] = defaultdict(int)
    for block in plan.forward.blocks:
        load[block.rank] += sum(tile.area for tile in plan.forward.tiles(block))
    return max(load.values(), default=1) * plan.ranks / max(1, sum(load.values()))


def _outlined(plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> Candidate:
    parts = [estimate(outline(phase, shape.batch), shape, hardware) for phase in plan.phases]
    seconds, sent = sum(part.seconds for part in parts), max(bytes_sent(plan, shape))
    idle = sum(part.idle_share * part.seconds for part in parts) / seconds if seconds else 0.0
    return Candidate(plan.schedule, plan.layout, plan, seconds, idle_share=idle, sent=sent)


def _simulated(plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> Candidate:
    run, sent = simulate(plan, shape, hardware), max(bytes_sent(plan, shape))
    slots = max(len(program.slots) for phase in plan.phases for program in lower_all(phase, shape.batch))
    found = Candidate(plan.schedule, plan.layout, plan, run.makespan, idle_share=run.idle_share, sent=sent)
    return replace(found, slots=slots, simulated=True)


def _with_ulysses(
    mask: Mask, ranks: int, layout: str, shape: AttentionShape, hardware: Hardware, degree: int, kept: bool
) -> list[Candidate]:
    """Return candidates with fewer ranks per plan: `degree` neighbours exchange heads for tokens around it."""
    split = split_heads(degree, ranks, shape.heads, shape.kv_heads)
    nbytes = split.exchanges(shape, mask.length // ranks, kept=kept)
    # Before and after each phase; no compute overlaps it.
    exchange, sent = sum(hardware.seconds_of_exchange(degree, each) for each in nbytes), sum(nbytes)
    inner = hardware
    if hardware.ranks_per_node is not None:
        inner = replace(hardware, ranks_per_node=max(1, hardware.ranks_per_node // degree))
    found = []
    for one in _of_schedules(mask, ranks // degree, layout, split.shape(shape), inner):
        if one.layout == "load_balanced":
            why = "neighbours do not hold the tokens that one rank of its plan would"
            one = Candidate(one.schedule, one.layout, refusal=why)
        elif one.plan:
            seconds = one.seconds + exchange
            idle = 1 - (1 - one.idle_share) * one.seconds / seconds
            one = replace(one, seconds=seconds, idle_share=idle, sent=one.sent + sent)
        found.append(replace(one, ulysses_degree=degree))
    # With one rank per plan every schedule is the same.
    return found if degree < ranks else [one for one in found if one.plan][:1]


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
