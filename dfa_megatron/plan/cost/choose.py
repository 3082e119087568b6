"""Choose a schedule. `auto` is the cheapest in outline among those that suit the mask, the layout and the ranks.

A plan is timed from its blocks and transfers alone, and never lowered. Blocks of one step that read the same buffers
count as one kernel call, and each result of a message as one merge. A batch waits for the compute of the step before,
because messages have two buffers per side. `simulate` runs the programs instead; tests hold the two together.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.language.ir import AttentionPlan, Phase, Plan, areas, loads, needed_pairs
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.mask import Mask, components
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.language.work import EVEN, TIE
from dfa_megatron.plan.lowering.messages import names_joined
from dfa_megatron.plan.schedules import ALL, OWNER_COMPUTES, SCHEDULES, Schedule, over_nodes, plan_named
from dfa_megatron.plan.schedules.assignments import direct


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of `auto`: its plan and its cost, or the reason for its refusal.

    device, host: seconds of forward and backward together, of the slowest rank; the two work at the same time.
    busy: mean seconds of compute. sent: the most bytes that one rank sends in both phases.
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

    @property
    def seconds(self) -> float:
        """Return the time of a call among others like it: a host issues the next one while its device computes."""
        return max(self.device, self.host)

    @property
    def name(self) -> str:
        """Return the schedule, a layout other than contiguous, and "gateway" if its route knows nodes."""
        where = f" on {self.layout}" if self.layout != "contiguous" else ""
        nodes = ", gateway" if self.plan is not None and self.plan.ranks_per_node is not None else ""
        return f"{self.schedule}{where}{nodes}"


def best(looked_at: tuple[Candidate, ...]) -> Candidate | None:
    """Return the first candidate, as `schedules.ALL` orders them, within TIE of the cheapest; None without any."""
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
    refused = [one for one in looked_at if not one.plan]
    return "\n".join([*lines, *(f"  {one.name:{width}s} {'-':>9s} {'':16s}  {one.refusal}" for one in refused)])


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
        routed = schedule in SCHEDULES and SCHEDULES[schedule].route is direct
        return plan_named(schedule, mask, ranks, hardware.node_size(ranks) if routed else None, held)
    if family in OWNER_COMPUTES and hardware.node_size(ranks) is None:
        return OWNER_COMPUTES[family].plan(mask, ranks, held=held)  # the only candidate
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
    """Return every schedule with its cost or its refusal, in the order of `schedules.ALL`.

    On hardware of several nodes a schedule comes with and without gateways.

    The arguments are those of `make_plan`.
    """
    found, held = list[Candidate](), layout if isinstance(layout, Layout) else None
    for schedule in ALL:
        why, instead = _needless(schedule, mask, ranks, layout) or _even(schedule, mask, ranks, found), ""
        try:
            found += [] if why else _priced(schedule, mask, ranks, held, sizes or Sizes(), hardware or H200_NVLINK)
        except UnsupportedError as error:
            why, instead = error.why, error.instead
        found += [Candidate(schedule.name, schedule.layout, refusal=why, instead=instead)] if why else []
    return tuple(found)


def _needless(schedule: Schedule, mask: Mask, ranks: int, layout: str | Layout) -> str:
    """Return the reason why a schedule cannot serve, or is another one by another name; or an empty string."""
    if _family(layout, mask) not in ("auto", schedule.layout):
        return f"it needs layout {schedule.layout!r}"
    if schedule.name == "balanced_shared" and ranks > 0:  # else it says so itself
        return _why_not_shared(mask, ranks, layout)
    return ""


def _even(schedule: Schedule, mask: Mask, ranks: int, found: list[Candidate]) -> str:
    """Return why `greedy`, which gives work away, is needless beside what was found; or an empty string."""
    for one in found if schedule.name == "greedy" else ():
        if one.plan is not None and one.layout == "contiguous":
            forward = one.plan.forward
            if ranks * max(loads(forward.blocks, mask, forward.layout)) <= (1 + EVEN) * mask.area:
                return f"the work of {one.schedule} is even"
    return ""


def _why_not_shared(mask: Mask, ranks: int, layout: str | Layout) -> str:
    """Return why `balanced_shared` cannot serve, or shares nothing: no row sees keys half of the ranks away."""
    held = layout.joined() if isinstance(layout, Layout) else contiguous(mask.length, ranks)
    pairs = [(held.owner[q], held.owner[kv]) for q, kv in needed_pairs(mask, held.chunks)]
    if any(q < kv for q, kv in pairs):
        return "it pairs causal work only, and rows see keys of later ranks"
    shares = ranks % 2 or any(2 * (q - kv) == ranks for q, kv in pairs)
    return "" if shares else "the last step of balanced has no work to share"


def _priced(
    schedule: Schedule, mask: Mask, ranks: int, held: Layout | None, sizes: Sizes, hardware: Hardware
) -> list[Candidate]:
    """Return the plans of a schedule with their costs, without gateways and with them.

    Raises:
        UnsupportedError: the schedule does not suit the mask or the ranks.
    """
    plans = [schedule.plan(mask, ranks, held=held)]
    if schedule.route is direct and (nodes := hardware.node_size(ranks)) is not None and nodes > 1:
        plans.append(over_nodes(plans[0], nodes))
    return [_candidate(plan, sizes, hardware) for plan in plans]


def _candidate(plan: AttentionPlan, sizes: Sizes, hardware: Hardware) -> Candidate:
    one, other = (estimate(outline(phase, sizes.batch), sizes, hardware) for phase in plan.phases)
    device, host, busy = one.seconds + other.seconds, one.host_seconds + other.host_seconds, one.busy + other.busy
    sent = max(map(sum, zip(one.sent, other.sent, strict=True)))
    return Candidate(plan.schedule, plan.layout, plan, device=device, host=host, busy=busy, sent=sent)


# The time of a plan in outline.


@dataclass(frozen=True, slots=True)
class Outline:
    """One phase, by step.

    work: (rank, token pairs, rows of queries, rows of keys) of calls. messages: (source, destination, index into
    `contents`). contents: (name, tokens) of each part of a message.
    """

    phase: Phase
    ranks: int
    work: Sequence[Sequence[tuple[int, int, int, int]]]
    messages: Sequence[Sequence[tuple[int, int, int]]]
    contents: Sequence[tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a run.

    seconds: of the devices; host_seconds: of the slowest rank's host, beside them. busy: mean seconds of compute.
    link_bytes, network_bytes: what each rank sends over its link and over its network adapter.
    """

    seconds: float
    host_seconds: float
    busy: float
    link_bytes: tuple[int, ...]
    network_bytes: tuple[int, ...]

    @property
    def sent(self) -> tuple[int, ...]:
        """Return the bytes that each rank sends."""
        return tuple(map(sum, zip(self.link_bytes, self.network_bytes, strict=True)))


def outline(plan: Plan, batch: int = 1) -> Outline:
    """Return the outline of a plan for `batch` sequences at once."""
    chunks, owner = plan.layout.chunks, plan.layout.owner
    rows, area = [len(chunk) for chunk in chunks], areas(plan.mask, chunks)
    row, joined = rows.__getitem__, names_joined(plan.mask, batch)
    joins_q, joins_kv = plan.phase.read_q in joined, plan.phase.read_kv in joined
    pairs: list[dict[tuple[int, ...], int]] = [defaultdict(int) for _ in range(plan.steps)]
    queries: list[dict[tuple[int, ...], set[int]]] = [defaultdict(set) for _ in range(plan.steps)]
    keys: list[dict[tuple[int, ...], set[int]]] = [defaultdict(set) for _ in range(plan.steps)]
    for at, rank, q, kv in plan.blocks:
        # A chunk's buffer: the rank's own, one per source rank, or one for all other ranks.
        rows_of, keys_of = owner[q], owner[kv]
        call = rank, -1 if joins_q and rows_of != rank else rows_of, -1 if joins_kv and keys_of != rank else keys_of
        pairs[at][call] += area[q, kv]
        queries[at][call].add(q)
        keys[at][call].add(kv)
    work = [
        [(call[0], its, sum(map(row, q[call])), sum(map(row, kv[call]))) for call, its in step.items()]
        for step, q, kv in zip(pairs, queries, keys, strict=True)
    ]
    sent: list[dict[tuple[int, int], dict[str, int]]] = [{} for _ in range(plan.steps)]
    for at, src, dst, what, chunk in plan.transfers:
        tokens = sent[at].setdefault((src, dst), {})
        tokens[what] = tokens.get(what, 0) + rows[chunk]
    numbers: dict[tuple[tuple[str, int], ...], int] = {}
    messages = [
        [(*ends, numbers.setdefault(tuple(parts.items()), len(numbers))) for ends, parts in step.items()]
        for step in sent
    ]
    return Outline(plan.phase, plan.ranks, work, messages, tuple(numbers))


def estimate(plan: Outline, sizes: Sizes, hardware: Hardware) -> Estimate:
    """Time a plan on a machine; sizes and hardware are as for `simulate`."""
    ranks = range(plan.ranks)
    row = {name: sum(sizes.row_bytes(name)) for name in {name for parts in plan.contents for name, _ in parts}}
    nbytes = [sum(row[name] * tokens for name, tokens in parts) for parts in plan.contents]
    merged = [sum(name in plan.phase.write_names for name, _ in parts) for parts in plan.contents]
    link, network = hardware.link, hardware.network or hardware.link
    seconds = [(link.seconds(size), network.seconds(size)) for size in nbytes]
    node = [hardware.node(rank) for rank in ranks]
    took = _kernel_seconds(plan, sizes, hardware)
    done, ended, delivered, busy = ([0.0] * plan.ranks for _ in range(4))
    sent, calls, merges, posts = ([0] * plan.ranks, [0] * plan.ranks), *([0] * plan.ranks for _ in range(3))
    for step, (work, messages) in enumerate(zip(plan.work, plan.messages, strict=True)):
        posted = [max(pair) for pair in zip(delivered, ended, strict=True)] if step > 1 else delivered
        for rank, *call in work:
            done[rank] += took[*call]
            busy[rank] += took[*call]
            calls[rank] += 1
        ended = done.copy()
        queued = [(src, dst, seconds[at][far := node[src] != node[dst]], far) for src, dst, at in messages]
        delivered, _ = deliver(queued, posted)
        done = [max(pair) for pair in zip(done, delivered, strict=True)]
        for (src, dst, at), (*_, far) in zip(messages, queued, strict=True):
            sent[far][src] += nbytes[at]
            posts[src] += 1
            posts[dst] += 1
            merges[dst] += merged[at]
            done[dst] += merged[at] * hardware.launch_overhead
            busy[dst] += merged[at] * hardware.launch_overhead
    host = max(hardware.host.seconds(calls[rank], merges[rank], posts[rank]) for rank in ranks)
    return Estimate(max(done), host, sum(busy) / plan.ranks, tuple(sent[False]), tuple(sent[True]))


def deliver(
    queued: Iterable[tuple[int, int, float, bool]], posted: Sequence[float]
) -> tuple[list[float], dict[tuple[int, int], tuple[float, float]]]:
    """Move the messages of one step; return when each rank has sent and received all of its own, and times by ends.

    On its link to the ranks of its node a rank sends one message at a time and receives one at a time. Its adapter to
    other nodes works the same way, beside it. The message that can start first goes first; lower ranks win a tie.

    Args:
        queued: source, destination, seconds, and whether it goes to another node.
        posted: when each rank has posted its batch.
    """
    times: dict[tuple[int, int], tuple[float, float]] = {}
    ports = [(list(posted), list(posted)) for _ in range(2)]  # (sending, receiving): of links, of adapters
    heap = [(max(posted[src], posted[dst]), src, dst, seconds, far) for src, dst, seconds, far in queued]
    heapq.heapify(heap)
    while heap:
        start, src, dst, seconds, far = heap[0]
        sending, receiving = ports[far]
        now = max(sending[src], receiving[dst])
        if now > start:
            heapq.heapreplace(heap, (now, src, dst, seconds, far))
            continue
        heapq.heappop(heap)
        sending[src] = receiving[dst] = start + seconds
        times[src, dst] = start, start + seconds
    return [max(ends) for ends in zip(*ports[0], *ports[1], strict=True)], times


def _kernel_seconds(plan: Outline, sizes: Sizes, hardware: Hardware) -> dict[tuple[int, ...], float]:
    """Return the seconds of one kernel call over (pairs, rows of queries, rows of keys)."""
    flops, heads = sizes.flops_per_pair(plan.phase), sizes.batch * sizes.heads
    found: dict[tuple[int, ...], float] = {}
    for pairs, queries, keys in {tuple(call) for step in plan.work for _, *call in step}:
        rate = hardware.rate(plan.phase.name, pairs, queries, keys, heads)
        found[pairs, queries, keys] = hardware.launch_overhead + pairs * flops / rate
    return found
