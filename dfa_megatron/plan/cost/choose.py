"""Choose a schedule. `auto` is the cheapest in outline among those that suit the mask, the layout and the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from typing import cast

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.cost.outline import Estimate, estimate, least_seconds, outline
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, Plan, needed_pairs
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.mask import Mask, components
from dfa_megatron.plan.language.shape import AttentionShape, split_heads
from dfa_megatron.plan.lowering.messages import names_joined
from dfa_megatron.plan.schedules import ALL, OWNER_COMPUTES, SCHEDULES, Schedule, plan_named
from dfa_megatron.plan.schedules.assignments import ROWS_PER_STEP
from dfa_megatron.plan.schedules.route import direct, gateway
from dfa_megatron.plan.uncollected import uncollected

TIE = 0.02
"""Plans whose times differ by less than this share are a tie. The order of `schedules.ALL` decides a tie."""

EXCHANGES = 4
"""All-to-alls of a degree above 1: before and after a forward and a backward."""

COPIED = 180e9
"""Bytes per second that an exchange brings to a plan of several ranks, which reads a copy in order. Measured: degree 2
on four ranks in benchmarks/results/2026-11-21-4xh200-ulysses-flash4.json.
"""

LOSES = "its work and its messages take longer than another schedule"

EVEN = 1.05
"""Work of the most loaded rank over the mean up to which `greedy` is not tried."""

FEW = 8
"""Ranks up to which the degrees are looked at in the order of what their exchange takes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of `auto`: its plan and its cost, or the reason for its refusal.

    device, host: seconds of forward and backward together, of the slowest rank; the two work at the same time.
    busy: mean seconds of compute. sent: the most bytes that one rank sends in both phases.
    ulysses_degree: number of neighbours that exchange heads around the plan; times and `sent` include the exchange.
    refusal, instead: set in place of a plan; the reason, and an alternative.
    """

    schedule: str
    layout: str = "contiguous"
    plan: AttentionPlan | None = None
    refusal: str = ""
    instead: str = ""
    device: float = 0.0
    host: float = 0.0
    busy: float = 0.0
    sent: int = 0
    ulysses_degree: int = 1

    @property
    def seconds(self) -> float:
        """Return the time of a call among others like it: a host issues the next one while its device computes."""
        return max(self.device, self.host)

    @property
    def name(self) -> str:
        """Return the schedule, a layout other than contiguous, "gateway" if its route knows nodes, a degree above 1."""
        where = f" on {self.layout}" if self.layout != "contiguous" else ""
        nodes = ", gateway" if self.plan is not None and self.plan.ranks_per_node is not None else ""
        degree = f", ulysses {self.ulysses_degree}" if self.ulysses_degree > 1 else ""
        return f"{self.schedule}{where}{nodes}{degree}"


def best(looked_at: tuple[Candidate, ...]) -> Candidate | None:
    """Return the first candidate within TIE of the cheapest, or None if every candidate is refused."""
    served = [candidate for candidate in looked_at if candidate.plan]
    least = min((candidate.seconds for candidate in served), default=0.0)
    return next((candidate for candidate in served if candidate.seconds <= least * (1 + TIE)), None)


def explain(looked_at: tuple[Candidate, ...]) -> str:
    """Format candidates as a table, the cheapest first, with the cost or the refusal of each.

    A star marks the choice of `auto`.
    """
    taken = best(looked_at)
    served = sorted((c for c in looked_at if c.plan), key=lambda candidate: candidate.seconds)
    width = max(len(candidate.name) for candidate in looked_at) + 2
    lines = [f"  {'schedule':{width}s} {'ms':>9s} {'idle':>6s} {'MB sent':>9s}  why"]
    for one in served:
        idle = 1 - one.busy / one.seconds if one.seconds else 0.0
        cost = f"{1e3 * one.seconds:9.3f} {100 * idle:5.1f}% {one.sent / 1e6:9.1f}"
        more = one.seconds / served[0].seconds - 1
        why = "a tie" if more <= TIE else f"{100 * more:.0f} % slower"
        if one is taken:
            why = "taken: the cheapest" if one is served[0] else "taken: a tie with the cheapest, and simpler than it"
        lines.append(f"{'* ' if one is taken else '  '}{one.name:{width}s} {cost}  {why}")
    refused = [one for one in looked_at if not one.plan and one.ulysses_degree == 1]
    return "\n".join([*lines, *(f"  {one.name:{width}s} {'-':>9s} {'':16s}  {one.refusal}" for one in refused)])


def make_plan(
    mask: Mask,
    ranks: int,
    *,
    schedule: str = "auto",
    layout: str | Layout = "auto",
    shape: AttentionShape | None = None,
    hardware: Hardware | None = None,
) -> AttentionPlan:
    """Plan a distributed attention. Equal arguments give an equal plan on every rank.

    Args:
        mask: pairs of the whole sequence that attend.
        ranks: number of ranks that share the sequence.
        schedule: a name of SCHEDULES, or "auto". Layouts other than contiguous allow "auto" only.
        layout: the tokens that a rank holds: one of LAYOUTS, a `Layout`, or "auto". With "auto" a named schedule uses
            contiguous; schedule "auto" compares all layouts.
        shape, hardware: the basis of the costs that `auto` compares. None is 32 heads of 128 in 16 bits on H200s of one
            host. On hardware of several nodes a named schedule crosses to a node once if its route can.

    Raises:
        UnsupportedError: an unknown name, or no schedule suits; the message lists every refusal.
    """
    hardware, ranks = hardware or H200_NVLINK, index(ranks)
    family, held = _family(layout, mask), layout if isinstance(layout, Layout) else None
    if family != "auto" and family not in LAYOUTS:
        raise UnsupportedError(f"layout {layout!r}", "there is no such layout", "one of auto, " + ", ".join(LAYOUTS))
    if schedule != "auto":
        if family not in ("auto", "contiguous"):
            what = f"schedule {schedule!r} on layout {str(layout)!r}"
            raise UnsupportedError(what, "there every rank computes its own rows", "schedule 'auto'")
        routed = schedule in SCHEDULES and SCHEDULES[schedule].route is direct
        return plan_named(schedule, mask, ranks, hardware.node_size(ranks) if routed else None, held)
    if family in OWNER_COMPUTES and hardware.node_size(ranks) is None:
        return OWNER_COMPUTES[family].plan(mask, ranks, held=held)  # the only candidate
    about = ranks, layout, shape or AttentionShape(), hardware
    if found := mask.kept.pop((automatic_degree, *about), None):
        return cast(AttentionPlan, found)
    looked_at = _of_schedules(mask, *about, math.inf)
    taken = best(looked_at)
    if taken is None or taken.plan is None:
        what = f"mask {mask.name} over {mask.length} tokens on {ranks} ranks in layout {str(layout)!r}"
        instead = dict.fromkeys(candidate.instead for candidate in looked_at if candidate.instead)
        raise UnsupportedError(what, f"no schedule suits ({_refusals(looked_at)})", "; ".join(instead))
    return taken.plan


def _family(layout: str | Layout, mask: Mask) -> str:
    """Return the name of a layout that the schedules know; a value is in order where it is in every component."""
    if isinstance(layout, str) or layout.in_order:
        return layout if isinstance(layout, str) else "contiguous"
    starts = {part.span.lo for part in components(mask)} if layout.queries is None else set()
    return "contiguous" if layout.falls <= starts else "load_balanced"


def _in_order(mask: Mask, ranks: int, layout: str | Layout | None) -> Layout:
    """Return one chunk per rank, and per side where there are two."""
    return layout.joined() if isinstance(layout, Layout) else contiguous(mask.length, ranks)


def _refusals(looked_at: tuple[Candidate, ...]) -> str:
    """Format every refusal; schedules with the same reason are named together."""
    reasons: dict[str, list[str]] = {}
    for candidate in looked_at:
        reasons.setdefault(candidate.refusal, []).append(candidate.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def candidates(
    mask: Mask,
    ranks: int,
    *,
    layout: str | Layout = "auto",
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
        for degree in _degrees(ranks, shape)[1:]:
            found = _of_schedules(mask, *_inside(degree, ranks, layout, shape, hardware))
            looked_at += _exchanging(found, mask, ranks, shape, hardware, degree, kept)
    return tuple(looked_at)


def _of_schedules(
    mask: Mask, ranks: int, layout: str | Layout, shape: AttentionShape, hardware: Hardware, most: float | None = None
) -> tuple[Candidate, ...]:
    """Return candidates without an exchange: all, or those that may win and take at most so long."""
    found: dict[Schedule, list[Candidate]] = {}
    load, held = dict[Schedule, float](), layout if isinstance(layout, Layout) else None
    limit = math.inf if most is None else most * (1 + TIE)  # what ties with one that may win is kept
    for schedule in ALL:
        why, instead = _needless(schedule, mask, ranks, layout, load), ""
        try:
            if not why:
                load[schedule] = schedule.load(mask, ranks, held)
        except UnsupportedError as error:
            why, instead = error.why, error.instead
        if why:
            found[schedule] = [Candidate(schedule.name, schedule.layout, refusal=why, instead=instead)]
    for schedule in sorted(load, key=load.__getitem__):  # the most even first: its time may show that others lose
        found[schedule] = _timed(schedule, mask, ranks, held, load[schedule], shape, hardware, limit)
        if most is not None:
            limit = min([limit, *(one.seconds * (1 + TIE) for one in found[schedule] if one.plan)])
    return tuple(one for schedule in ALL for one in found[schedule])


def _needless(schedule: Schedule, mask: Mask, ranks: int, layout: str | Layout, loads: dict[Schedule, float]) -> str:
    """Return the reason why a schedule cannot serve or win beside those before it, or an empty string."""
    if ranks < 1:
        return ""  # it says so itself
    if _family(layout, mask) not in ("auto", schedule.layout):
        return f"it needs layout {schedule.layout!r}"
    if schedule.name == "balanced_shared" and (why := _why_not_shared(mask, ranks, layout)):
        return why
    if ranks == 1 and loads:
        return "one rank computes all of it in every schedule"
    has_zigzag = any(other.layout == "zigzag" for other in loads)
    if schedule.layout == "load_balanced" and has_zigzag and len(components(mask)) == 1:
        return "there is one sequence, which zigzag balances"
    if schedule.name == "greedy":
        limit = EVEN * mask.area
        even = [other.name for other, load in loads.items() if other.layout == "contiguous" and load * ranks <= limit]
        return f"the work of {even[0]} is even" if even else ""
    return ""


def _why_not_shared(mask: Mask, ranks: int, layout: str | Layout) -> str:
    """Return why `balanced_shared` cannot serve, or shares nothing: no row sees keys half of the ranks away."""
    held = _in_order(mask, ranks, layout)
    pairs = [(held.owner[q], held.owner[kv]) for q, kv in needed_pairs(mask, held.chunks)]
    if any(q < kv for q, kv in pairs):
        return "it pairs causal work only, and rows see keys of later ranks"
    shares = ranks % 2 or any(2 * (q - kv) == ranks for q, kv in pairs)
    return "" if shares else "the last step of balanced has no work to share"


def _longest(schedule: Schedule, mask: Mask, ranks: int, held: Layout | None, shape: AttentionShape) -> float:
    """Return the side of a square of at least as many pairs as any kernel call of a schedule.

    A call has the rows of one rank and the keys of another. Where steps are cut by memory and messages are joined, it
    has what ROWS_PER_STEP allows.
    """
    layout = _in_order(mask, ranks, held)
    tokens = max(sum(map(len, layout.spans(rank))) for rank in range(ranks))
    by_memory = schedule.name == "greedy" or schedule.layout == "load_balanced"
    remote = ROWS_PER_STEP if by_memory and names_joined(mask, shape.batch) else 1
    return tokens * math.sqrt(remote)


def _timed(
    schedule: Schedule, mask: Mask, ranks: int, held: Layout | None, load: float, shape: AttentionShape,
    hardware: Hardware, most: float,
) -> list[Candidate]:  # fmt: skip
    """Return the plans of a schedule, without gateways and with them, or refusals of those that take over `most`.

    They are refused as soon as a bound shows it: the compute of the most loaded rank, then the steps so far with the
    compute that is left.
    """
    nodes = hardware.node_size(ranks) if schedule.route is direct else None
    lost = Candidate(schedule.name, schedule.layout, refusal=LOSES)
    bounds = least_seconds(load, _longest(schedule, mask, ranks, held, shape), shape, hardware)
    found: dict[int | None, list[tuple[Plan, Estimate]]] = {way: [] for way in (None, nodes if nodes != 1 else None)}
    if sum(bounds) > most:
        return [lost] * len(found)
    layout, blocks = schedule.assigned(mask, ranks, held)
    blocks = tuple(sorted(blocks))
    for number, phase in enumerate((FORWARD, BACKWARD)):
        if not any(len(parts) == number for parts in found.values()):
            break
        plain = Plan(mask, layout, phase, blocks, schedule.route(blocks, layout, phase))
        for way, parts in found.items():
            if len(parts) < number:
                continue
            plan = plain if way is None else replace(plain, transfers=gateway(plain.transfers, layout, phase, way))
            spent = sum(part.seconds for _, part in parts) + sum(bounds[number + 1 :])
            one = estimate(outline(plan, shape.batch), shape, hardware, most=most - spent)
            if one.seconds < math.inf:
                parts.append((plan, one))
    return [_candidate(schedule, way, parts) if len(parts) == 2 else lost for way, parts in found.items()]


def _candidate(schedule: Schedule, nodes: int | None, parts: list[tuple[Plan, Estimate]]) -> Candidate:
    (forward, one), (backward, other) = parts
    plan = AttentionPlan(schedule.name, schedule.layout, forward, backward, nodes)
    device, host, busy = one.seconds + other.seconds, one.host_seconds + other.host_seconds, one.busy + other.busy
    sent = max(map(sum, zip(one.sent, other.sent, strict=True)))
    return Candidate(plan.schedule, plan.layout, plan, device=device, host=host, busy=busy, sent=sent)


@uncollected()
def automatic_degree(
    mask: Mask, ranks: int, *, schedule: str, layout: str | Layout, shape: AttentionShape, hardware: Hardware
) -> int:
    """Return the number of neighbours that exchange heads for ulysses_degree="auto".

    It is the lowest within TIE of the cheapest; among plans of more than FEW ranks, those of fewer win a tie. Several
    documents always give 1, because they send little, and a schedule that is named runs over all ranks.
    """
    if schedule != "auto" or len(components(mask)) > 1:
        return 1
    looked_at, most, over_alone, plans = list[Candidate](), math.inf, 0.0, {}
    exchange = {d: _exchange_seconds(mask, ranks, shape, hardware, d, kept=True)[0] for d in _degrees(ranks, shape)}
    # Plans of few ranks are soon made, and bound those of many. A plan of more ranks sends more behind less compute. So
    # it takes longer, as its kernel alone does, than one of fewer, whose exchange it saves.
    for degree in sorted(exchange, key=lambda degree: (max(FEW, ranks // degree), exchange[degree])):
        is_few, about = ranks // degree <= FEW, _inside(degree, ranks, layout, shape, hardware)
        if (alone := _kernel_alone(mask, *about)) * over_alone >= (1 - TIE) * most:
            continue
        found = _of_schedules(mask, *about, most * (1 + TIE) - exchange[degree] if is_few else most)
        plans[degree] = about, best(found)
        of_degree = _exchanging(found, mask, ranks, shape, hardware, degree, True)
        looked_at += [one for one in of_degree if one.plan and (is_few or one.seconds <= most)]
        most = min([most, *(one.seconds for one in looked_at)])
        inner = [one.device if one.plan else math.inf for one in found if one.plan or one.refusal == LOSES]
        over_alone = min(inner, default=0.0) / alone if alone and not is_few else 0.0
    taken = best(tuple(sorted(looked_at, key=lambda one: one.ulysses_degree)))
    about, one = plans[degree := taken.ulysses_degree if taken else 1]
    if one:
        mask.kept[automatic_degree, *about] = one.plan  # until `make_plan` is asked for it
    return degree


def _kernel_alone(mask: Mask, ranks: int, layout: str | Layout, shape: AttentionShape, hardware: Hardware) -> float:
    """Return the seconds of a rank's mean work in squares of its tokens, forward and backward."""
    side, heads, pairs = mask.length // ranks, shape.batch * shape.heads, mask.area / ranks
    rates = ((phase, hardware.rate(phase.name, side * side, side, side, heads)) for phase in (FORWARD, BACKWARD))
    return sum(pairs * shape.flops_per_pair(phase) / rate for phase, rate in rates)


def _degrees(ranks: int, shape: AttentionShape) -> list[int]:
    return [d for d in range(1, ranks + 1) if ranks % d == 0 and shape.heads % d == 0]


def _inside(
    degree: int, ranks: int, layout: str | Layout, shape: AttentionShape, hardware: Hardware
) -> tuple[int, str | Layout, AttentionShape, Hardware]:
    """Return what a plan is made for around which `degree` neighbours exchange heads for tokens."""
    inner = split_heads(degree, ranks, shape.heads, shape.kv_heads).shape(shape)
    return ranks // degree, layout if isinstance(layout, str) else layout.merged(degree), inner, hardware.inside(degree)


def _exchanging(
    found: Iterable[Candidate], mask: Mask, ranks: int, shape: AttentionShape, hardware: Hardware, degree: int,
    kept: bool,
) -> list[Candidate]:  # fmt: skip
    """Return the candidates of `_inside` with the costs of the exchange."""
    if degree == 1:
        return [*found]
    out, (exchange, sent) = [], _exchange_seconds(mask, ranks, shape, hardware, degree, kept=kept)
    for one in found:
        if one.layout == "load_balanced":
            one = Candidate(one.schedule, one.layout, refusal="neighbours do not hold the tokens of one of its ranks")
        elif one.plan:
            host = one.host + EXCHANGES * hardware.host.exchange
            one = replace(one, device=one.device + exchange, host=host, sent=one.sent + sent)
        out.append(replace(one, ulysses_degree=degree))
    return out


def _exchange_seconds(
    mask: Mask, ranks: int, shape: AttentionShape, hardware: Hardware, degree: int, *, kept: bool
) -> tuple[float, int]:
    """Return (seconds, bytes that a rank sends) of all exchanges of a forward and a backward; no compute overlaps."""
    split = split_heads(degree, ranks, shape.heads, shape.kv_heads)
    nbytes = split.exchanges(shape, mask.length // ranks, kept=kept)
    copied = sum(nbytes) / COPIED if degree < ranks else 0.0
    return copied + sum(hardware.seconds_of_exchange(degree, each) for each in nbytes), sum(nbytes)
