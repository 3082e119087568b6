"""Choose a schedule. `auto` is the cheapest by simulation among those that suit the mask, the layout and the ranks.

A plan is timed over clocks in outline: from its blocks and transfers alone, which are never lowered. Blocks of one step
that read the same buffers count as one kernel call, and each result of a message as one merge. A batch waits for the
compute of the step before, because messages have two buffers per side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import index
from typing import Literal, NamedTuple

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS, nearest
from dfa_megatron.names import SCHEDULES as NAMED
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware, deliver
from dfa_megatron.plan.language.ir import AttentionPlan, Block, Phase, Plan, areas, loads, needed_pairs
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.mask import Mask, components
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.language.work import EVEN, TIE
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.lowering.messages import names_joined
from dfa_megatron.plan.schedules import ALL, OWNER_COMPUTES, SCHEDULES, Schedule, over_nodes
from dfa_megatron.plan.schedules.assignments import direct


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of `auto`: its plan and its cost, or the reason for its refusal.

    cost: of forward and backward together.
    refusal, instead: set in place of a plan; the reason, and an alternative.
    lead: seconds by which the host is ahead of its device in the rest of a layer.
    """

    schedule: str
    layout: str
    plan: AttentionPlan | None = None
    cost: Timeline | None = None
    refusal: str = ""
    instead: str = ""
    lead: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the time of a call in a layer, by its device or its host; infinite without a plan."""
        return inf if self.cost is None else max(self.cost.makespan, self.cost.host - self.lead)

    @property
    def name(self) -> str:
        """Return the schedule, a layout other than contiguous, and "gateway" if its route knows nodes."""
        where = f" on {self.layout}" if self.layout != "contiguous" else ""
        nodes = ", gateway" if self.plan is not None and self.plan.ranks_per_node is not None else ""
        return f"{self.schedule}{where}{nodes}"


def best(looked_at: tuple[Candidate, ...]) -> Candidate | None:
    """Return the first candidate, as `schedules.ALL` orders them, within TIE of the cheapest; None without any."""
    least = min((candidate.seconds for candidate in looked_at), default=inf)
    return next((one for one in looked_at if one.plan and one.seconds <= least * (1 + TIE)), None)


def make_plan(
    mask: Mask,
    ranks: int,
    *,
    schedule: str = "auto",
    layout: str | Layout = "auto",
    sizes: Sizes | None = None,
    hardware: Hardware | None = None,
) -> AttentionPlan:
    """Plan a distributed attention. Equal arguments give an equal plan on every rank.

    Args:
        mask: pairs of the whole sequence that attend.
        ranks: number of ranks that share the sequence.
        schedule: a name of SCHEDULES, or "auto". Layouts other than contiguous allow "auto" only.
        layout: the tokens that a rank holds: one of LAYOUTS, a `Layout`, or "auto". With "auto" a named schedule uses
            contiguous; schedule "auto" compares all layouts.
        sizes, hardware: the basis of the costs that `auto` compares. None is 32 heads of 128 in 16 bits on H200s of one
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
        if (named := SCHEDULES.get(schedule)) is None:
            raise UnsupportedError(f"schedule {schedule!r}", "there is no such schedule", nearest(schedule, NAMED))
        plan, nodes = named.plan(mask, ranks, held), hardware.node_size(ranks)
        return plan if nodes is None or named.route is not direct else over_nodes(plan, nodes)
    if family in OWNER_COMPUTES and hardware.node_size(ranks) is None:
        return OWNER_COMPUTES[family].plan(mask, ranks, held)  # the only candidate
    looked_at = candidates(mask, ranks, layout=layout, sizes=sizes, hardware=hardware)
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
    sizes: Sizes | None = None,
    hardware: Hardware | None = None,
) -> tuple[Candidate, ...]:
    """Return every schedule with its cost or its refusal, in the order of `schedules.ALL`; arguments as of `make_plan`.

    On hardware of several nodes a schedule comes with and without gateways.
    """
    found, held = list[Candidate](), layout if isinstance(layout, Layout) else None
    for schedule in ALL:
        why, instead = _needless(schedule, mask, ranks, layout, found), ""
        try:
            found += [] if why else _priced(schedule, mask, ranks, held, sizes or Sizes(), hardware or H200_NVLINK)
        except UnsupportedError as error:
            why, instead = error.why, error.instead
        found += [Candidate(schedule.name, schedule.layout, refusal=why, instead=instead)] if why else []
    return tuple(found)


def _needless(schedule: Schedule, mask: Mask, ranks: int, layout: str | Layout, found: list[Candidate]) -> str:
    """Return why a schedule cannot serve, or is needless beside what was found; or an empty string."""
    if _family(layout, mask) not in ("auto", schedule.layout):
        return f"it needs layout {schedule.layout!r}"
    if schedule.name == "balanced_shared" and ranks > 0 and ranks % 2 == 0:
        held = layout.joined() if isinstance(layout, Layout) else contiguous(mask.length, ranks)
        pairs = needed_pairs(mask, held.chunks)
        if all(2 * (held.owner[q] - held.owner[kv]) != ranks for q, kv in pairs):
            return "the last step of balanced has no work to share"
    for one in found if schedule.name == "greedy" else ():
        if one.plan is not None and one.layout == "contiguous":
            forward = one.plan.forward
            if ranks * max(loads(forward.blocks, mask, forward.layout)) <= (1 + EVEN) * mask.area:
                return f"the work of {one.schedule} is even"
    return ""


def _priced(
    schedule: Schedule, mask: Mask, ranks: int, held: Layout | None, sizes: Sizes, hardware: Hardware
) -> list[Candidate]:
    """Return the plans of a schedule with their costs, without gateways and with them; or refuse."""
    plans = [schedule.plan(mask, ranks, held)]
    if schedule.route is direct and (nodes := hardware.node_size(ranks)) is not None and nodes > 1:
        plans.append(over_nodes(plans[0], nodes))
    lead = hardware.lead(sizes.batch * mask.length // ranks, sizes.heads * sizes.head_dim)
    return [Candidate(plan.schedule, plan.layout, plan, timed(plan, sizes, hardware), lead=lead) for plan in plans]


# The time of a plan.


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of a rank from `start` to `end`, in seconds.

    label: what travels or is merged. peer: the other end of a message, or -1. blocks: of a kernel call.
    """

    rank: int
    kind: Literal["compute", "send", "receive"]
    phase: str
    step: int
    start: float
    end: float
    label: str = ""
    peer: int = -1
    nbytes: int = 0
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated run of the devices.

    busy: seconds of compute per rank; the rest of the makespan is idle. sent, received: bytes of each rank.
    host: seconds that the slowest rank's host takes to issue the run.
    """

    makespan: float
    busy: tuple[float, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    host: float
    events: tuple[Event, ...] = ()

    @property
    def idle_share(self) -> float:
        """Return idle time as a share of all ranks' time."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    def then(self, after: Timeline) -> Timeline:
        """Return this run followed by another, which starts when every rank is done."""
        late = self.makespan
        moved = (replace(event, start=event.start + late, end=event.end + late) for event in after.events)
        pairs = ((getattr(self, name), getattr(after, name)) for name in ("busy", "sent", "received"))
        busy, sent, received = (tuple(map(sum, zip(*pair, strict=True))) for pair in pairs)
        host = self.host + after.host
        return Timeline(late + after.makespan, busy, sent, received, host, (*self.events, *moved))


def simulate(plan: AttentionPlan | Plan, sizes: Sizes | None = None, hardware: Hardware = H200_NVLINK) -> Timeline:
    """Run a plan over clocks, as `auto` does with every plan that it compares.

    Each rank has a compute queue and a communication queue. A step's batch starts after the previous batch and the
    compute before it, once both ends are ready. A rank sends one message at a time and receives one at a time. A step
    lands when its whole batch has landed. Not modelled: the slowdown of a kernel by messages beside it, and the memory
    traffic of a merge. Both phases of an AttentionPlan run one after the other. The host's time is a sum beside the
    timeline.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    sizes = sizes or Sizes()
    for phase in plan.phases:
        lower_all(phase, sizes.batch)  # which refuses what cannot run
    return timed(plan, sizes, hardware, events=True)


def timed(plan: AttentionPlan | Plan, sizes: Sizes, hardware: Hardware, *, events: bool = False) -> Timeline:
    """Return the same of a plan that is right, with events only if asked for."""
    first, *others = (clocked(outline(phase, sizes.batch), sizes, hardware, events=events) for phase in plan.phases)
    return first.then(others[0]) if others else first


class CallOutline(NamedTuple):
    """One kernel call in outline: token pairs, and rows of queries and of keys."""

    rank: int
    pairs: int
    queries: int
    keys: int
    blocks: tuple[Block, ...] = ()


Contents = tuple[tuple[str, int], ...]
"""(name, tokens) of each part of a message."""


@dataclass(frozen=True, slots=True)
class Outline:
    """One phase, by step: its kernel calls, and (source, destination, parts) of its messages."""

    phase: Phase
    ranks: int
    work: Sequence[Sequence[CallOutline]]
    messages: Sequence[Sequence[tuple[int, int, Contents]]]


def outline(plan: Plan, batch: int = 1) -> Outline:
    """Return the outline of a plan for `batch` sequences at once."""
    chunks, owner = plan.layout.chunks, plan.layout.owner
    rows, area = [len(chunk) for chunk in chunks], areas(plan.mask, chunks)
    joined = names_joined(plan.mask, batch)
    joins_q, joins_kv = plan.phase.read_q in joined, plan.phase.read_kv in joined
    calls: list[dict[tuple[int, int, int], list[Block]]] = [defaultdict(list) for _ in range(plan.steps)]
    for block in plan.blocks:
        at, rank, q, kv = block
        # A chunk's buffer: the rank's own, one per source rank, or one for all other ranks.
        rows_of, keys_of = owner[q], owner[kv]
        call = rank, -1 if joins_q and rows_of != rank else rows_of, -1 if joins_kv and keys_of != rank else keys_of
        calls[at][call].append(block)

    def work(rank: int, blocks: list[Block]) -> CallOutline:
        pairs = sum(area[q, kv] for _, _, q, kv in blocks)
        queries, keys = {q for _, _, q, _ in blocks}, {kv for _, _, _, kv in blocks}
        return CallOutline(rank, pairs, sum(rows[q] for q in queries), sum(rows[kv] for kv in keys), tuple(blocks))

    sent: list[dict[tuple[int, int], dict[str, int]]] = [{} for _ in range(plan.steps)]
    for at, src, dst, what, chunk in plan.transfers:
        tokens = sent[at].setdefault((src, dst), {})
        tokens[what] = tokens.get(what, 0) + rows[chunk]
    return Outline(
        plan.phase,
        plan.ranks,
        [[work(rank, blocks) for (rank, _, _), blocks in step.items()] for step in calls],
        [[(*ends, tuple(parts.items())) for ends, parts in step.items()] for step in sent],
    )


def clocked(plan: Outline, sizes: Sizes, hardware: Hardware, *, events: bool = False) -> Timeline:
    """Run an outline over clocks; `events` are only noted if asked for."""
    clocks = _Clocks(plan, sizes, hardware, note=events)
    for step, (work, messages) in enumerate(zip(plan.work, plan.messages, strict=True)):
        for call in work:
            clocks.compute(step, call)
        clocks.move(step, messages)
    busy, sent, received = tuple(clocks.busy), tuple(clocks.sent), tuple(clocks.received)
    return Timeline(max(clocks.done), busy, sent, received, max(clocks.host), tuple(clocks.events))


class _Clocks:
    """Until when each rank computes, until when its messages move, and what it has done by then."""

    def __init__(self, plan: Outline, sizes: Sizes, hardware: Hardware, *, note: bool) -> None:
        self.hardware, self.note, self.phase, self.events = hardware, note, plan.phase, list[Event]()
        self.done, self.ended, self.delivered, self.busy = ([0.0] * plan.ranks for _ in range(4))
        self.sent, self.received = ([0] * plan.ranks for _ in range(2))
        self.host = [hardware.host.run] * plan.ranks
        self.node = [rank // (hardware.ranks_per_node or plan.ranks) for rank in range(plan.ranks)]
        names = {name for step in plan.messages for _, _, parts in step for name, _ in parts}
        self.row = {name: sum(sizes.row_bytes(name)) for name in names}
        phase, flops, heads = plan.phase.name, sizes.flops_per_pair(plan.phase), sizes.batch * sizes.heads
        self.seconds = {
            shape: hardware.launch_overhead + shape[0] * flops / hardware.rate(phase, *shape, heads)
            for shape in {call[1:4] for step in plan.work for call in step}
        }

    def compute(self, step: int, call: CallOutline) -> None:
        """Put one kernel call on its rank's compute queue."""
        self.host[call.rank] += self.hardware.host.call
        self._work(step, call.rank, self.seconds[call[1:4]], blocks=call.blocks)

    def move(self, step: int, messages: Sequence[tuple[int, int, Contents]]) -> None:
        """Move the messages of a step behind its compute, and merge the results that they bring."""
        links, ends = (self.hardware.link, self.hardware.network or self.hardware.link), (self.delivered, self.ended)
        posted = [max(pair) for pair in zip(*ends, strict=True)] if step > 1 else self.delivered
        self.ended = self.done.copy()
        nbytes = [sum(self.row[name] * tokens for name, tokens in parts) for _, _, parts in messages]
        far = [self.node[src] != self.node[dst] for src, dst, _ in messages]
        queued = [
            (src, dst, links[away].seconds(size), away)
            for (src, dst, _), size, away in zip(messages, nbytes, far, strict=True)
        ]
        self.delivered, times = deliver(queued, posted)
        self.done = [max(pair) for pair in zip(self.done, self.delivered, strict=True)]
        for (src, dst, parts), size in zip(messages, nbytes, strict=True):
            self.sent[src] += size
            self.received[dst] += size
            self.host[src] += self.hardware.host.message
            self.host[dst] += self.hardware.host.message
            if self.note:
                span, label = times[src, dst], "+".join(name for name, _ in parts)
                self.events.append(Event(src, "send", self.phase.name, step, *span, label, dst, size))
                self.events.append(Event(dst, "receive", self.phase.name, step, *span, label, src, size))
            for name, _ in parts:
                if name in self.phase.write_names:
                    self.host[dst] += self.hardware.host.merge
                    self._work(step, dst, self.hardware.launch_overhead, f"merge {name}")

    def _work(self, step: int, rank: int, seconds: float, label: str = "", blocks: tuple[Block, ...] = ()) -> None:
        start, self.done[rank] = self.done[rank], self.done[rank] + seconds
        self.busy[rank] += seconds
        if self.note and seconds:
            end = self.done[rank]
            self.events.append(Event(rank, "compute", self.phase.name, step, start, end, label, blocks=blocks))
