"""Choosing a schedule: `auto` is the cheapest, by simulation, of those that suit the mask, the layout and the ranks."""

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
"""Makespans closer than this share are equal: the order of `schedules.ALL` decides what the model cannot."""

EVEN = 1.05
"""Work over the mean, of the most loaded rank, up to which nobody asks `greedy` for help."""

WAITING, MARGIN = 0.25, 0.1
"""What ulysses_degree="auto" asks of an exchange of heads. Over NVLink the simulation leaves ranks idle for less than a
quarter of the time, and an exchange was measured to be slower. All-to-alls are not overlapped, hence the margin.
"""

MANY_RANKS = 16
"""Above so many ranks plans are timed in outline, which takes seconds less and is a few per cent off."""

MANY_TILES = 4
"""Above so many tiles (packs come anew with every batch) so are all but the one that is taken, which has proved itself
in a simulation: an outline may be too hopeful, where a rank's work in a step is in many pieces.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that `auto` looked at: its plan and what it costs, or why it is out of the question.

    seconds, idle_share: of forward and backward together. sent: the most bytes of any rank, of both. slots: the most
    buffers of any rank in either phase. simulated: by `simulate`; else in outline, which leaves slots at 0.
    ulysses_degree: how many neighbours exchange heads for tokens around the plan; the exchange is in `seconds` and
    `sent`. refusal, instead: why it cannot serve, and what could.
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
        """The schedule, its layout where that decides, "gateway" where its route knows nodes, and a degree above 1."""
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
        mask: which pairs of the whole sequence attend.
        ranks: how many ranks share it.
        schedule: a name of SCHEDULES, or "auto", which is the one value where the layout is not contiguous.
        layout: the tokens that a rank holds, one of LAYOUTS. "auto" allows "auto" all of them, and is contiguous
            for a schedule by name.
        shape, hardware: what `auto` compares costs for; None is 32 heads of 128 in 16 bits on H200s of one host. On
            hardware of several nodes a schedule by name crosses to a node once where its route can.

    Raises:
        UnsupportedError: an unknown name, or nothing suits; the message has every refusal.
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
    """The cheapest candidate; of those within TIE of it the first. None where none can serve."""
    served = [candidate for candidate in looked_at if candidate.plan]
    least = min((candidate.seconds for candidate in served), default=0.0)
    return next((candidate for candidate in served if candidate.seconds <= least * (1 + TIE)), None)


def automatic_degree(
    mask: Mask, ranks: int, *, schedule: str, layout: str, shape: AttentionShape, hardware: Hardware
) -> int:
    """Return how many neighbours exchange heads for ulysses_degree="auto".

    More than 1 only where ranks wait for more than WAITING of the time without an exchange, which fast links never make
    them do, and where the simulation is faster by more than MARGIN with one. 1 for documents, which are sent little.
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
    """Every schedule with its cost or the reason why it is not taken, in the order of `schedules.ALL`.

    On hardware of several nodes a schedule comes with and without gateways.

    Args:
        mask, ranks, layout, shape, hardware: as for `make_plan`.
        degrees: also with every degree of Ulysses that divides ranks and heads, after those without.
        kept: with Ulysses, the backward has what the forward exchanged where it may: nothing is rematerialized.
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
    """Why a schedule for packs cannot win here, or an empty string."""
    served = [candidate for candidate in looked_at if candidate.plan]
    if one.layout == "load_balanced" and any(c.layout == "zigzag" for c in served) and len(components(mask)) == 1:
        return "there is one sequence, which zigzag balances"
    if one.schedule == "greedy":
        for candidate in served:
            if candidate.plan and candidate.plan.layout == "contiguous" and imbalance(candidate.plan) <= EVEN:
                return f"the work of {candidate.schedule} is even"
    return ""


def imbalance(plan: AttentionPlan) -> float:
    """The work of the most loaded rank over the mean, in token pairs."""
    load: dict[int, int] = defaultdict(int)
    for block in plan.forward.blocks:
        load[block.rank] += sum(tile.area for tile in plan.forward.tiles(block))
    return max(load.values(), default=1) * plan.ranks / max(1, sum(load.values()))


def _outlined(plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> Candidate:
    parts = [estimate(outline(phase, shape.batch), shape, hardware) for phase in plan.phases]
    seconds = sum(part.seconds for part in parts)
    idle = sum(part.idle_share * part.seconds for part in parts) / seconds if seconds else 0.0
    return Candidate(plan.schedule, plan.layout, plan, seconds, idle_share=idle, sent=max(bytes_sent(plan, shape)))


def _simulated(plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> Candidate:
    run = simulate(plan, shape, hardware)
    slots = max(len(program.slots) for phase in plan.phases for program in lower_all(phase, shape.batch))
    sent = max(bytes_sent(plan, shape))
    return Candidate(
        plan.schedule,
        plan.layout,
        plan,
        run.makespan,
        idle_share=run.idle_share,
        sent=sent,
        slots=slots,
        simulated=True,
    )


def _with_ulysses(
    mask: Mask, ranks: int, layout: str, shape: AttentionShape, hardware: Hardware, degree: int, kept: bool
) -> list[Candidate]:
    """The same with fewer ranks per plan: neighbours exchange heads for tokens before and after."""
    split = split_heads(degree, ranks, shape.heads, shape.kv_heads)
    nbytes = split.exchanges(shape, mask.length // ranks, kept=kept)
    # Before and after each phase; nothing is computed meanwhile.
    exchange, sent = sum(hardware.seconds_of_exchange(degree, each) for each in nbytes), sum(nbytes)
    inner = hardware
    if hardware.ranks_per_node is not None:
        inner = replace(hardware, ranks_per_node=max(1, hardware.ranks_per_node // degree))
    found = []
    looked_at = _of_schedules(mask, ranks // degree, layout, split.shape(shape), inner)
    why = "neighbours do not hold the tokens that one rank of its plan would"
    looked_at = [
        Candidate(one.schedule, one.layout, refusal=why) if one.layout == "load_balanced" else one for one in looked_at
    ]
    if degree == ranks:  # one rank per plan: every schedule is the same
        looked_at = [candidate for candidate in looked_at if candidate.plan][:1]
    for candidate in looked_at:
        seconds = candidate.seconds + exchange
        computed = (1 - candidate.idle_share) * candidate.seconds
        found.append(
            replace(
                candidate,
                ulysses_degree=degree,
                seconds=seconds,
                idle_share=1 - computed / seconds,
                sent=candidate.sent + sent,
            )
            if candidate.plan
            else replace(candidate, ulysses_degree=degree)
        )
    return found


def explain(looked_at: tuple[Candidate, ...]) -> str:
    """Candidates as a table, the cheapest first, with what each costs or why it is out; a star marks what `auto` takes,
    which leaves the degree of Ulysses to its option.
    """
    taken = best(tuple(candidate for candidate in looked_at if candidate.ulysses_degree == 1))
    served = sorted((c for c in looked_at if c.plan), key=lambda candidate: candidate.seconds)
    width = max(len(candidate.name) for candidate in looked_at) + 2
    lines = [f"  {'schedule':{width}s} {'ms':>9s} {'idle':>6s} {'MB sent':>9s} {'slots':>5s}  why"]
    for candidate in served:
        slots = str(candidate.slots) if candidate.simulated else "-"
        cost = (
            f"{1e3 * candidate.seconds:9.3f} {100 * candidate.idle_share:5.1f}% {candidate.sent / 1e6:9.1f} {slots:>5s}"
        )
        star = "* " if candidate is taken else "  "
        lines.append(f"{star}{candidate.name:{width}s} {cost}  {_why(candidate, taken, served[0])}")
    out = [candidate for candidate in looked_at if not candidate.plan and candidate.ulysses_degree == 1]
    lines += [
        f"  {candidate.name:{width}s} {'-':>9s} {'':6s} {'':9s} {'':5s}  {candidate.refusal}" for candidate in out
    ]
    return "\n".join(lines)


def _why(candidate: Candidate, taken: Candidate | None, least: Candidate) -> str:
    more = candidate.seconds / least.seconds - 1 if least.seconds else 0.0
    if candidate is taken and candidate is least:
        return "taken: the cheapest"
    if candidate is taken and more <= TIE:
        return "taken: a tie with the cheapest, and simpler"
    if candidate is least and candidate.ulysses_degree > 1:
        return f"the cheapest, with ulysses_degree={candidate.ulysses_degree}"
    slower = "a tie" if more <= TIE else f"{100 * more:.0f} % slower"
    return f"taken: the cheapest without an exchange of heads, {slower}" if candidate is taken else slower


def _nodes(hardware: Hardware, ranks: int) -> int | None:
    """Ranks per node, where there are several nodes."""
    nodes = hardware.ranks_per_node
    return nodes if nodes is not None and nodes < ranks else None


def _refusals(looked_at: tuple[Candidate, ...]) -> str:
    """Every refusal, with the schedules that share a reason named together."""
    reasons: dict[str, list[str]] = {}
    for candidate in looked_at:
        reasons.setdefault(candidate.refusal, []).append(candidate.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
