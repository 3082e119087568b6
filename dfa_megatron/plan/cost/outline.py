"""Time a plan from its blocks and transfers alone: `auto` compares candidates by it, and never lowers one.

Blocks of one step that read the same buffers, or landed and own keys for the same rows, count as one kernel call, and
each result of a message as one merge. A batch waits for the compute of the step before, because messages have two
buffers per side. `simulate` runs the programs instead; tests hold the two together. An outline also stretches to other
lengths, for hundreds of ranks at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dfa_megatron.plan.cost.hardware import Hardware
from dfa_megatron.plan.language.ir import Phase, Plan, areas
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.messages import names_joined


@dataclass(frozen=True, slots=True)
class Outline:
    """One phase, by step.

    work: (rank, token pairs, rows of queries, rows of keys) of calls. messages: (source, destination, index into
    `contents`). contents: (name, tokens) of each part of a message.
    """

    phase: Phase
    ranks: int
    length: int
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
    return Outline(plan.phase, plan.ranks, plan.mask.length, work, messages, tuple(numbers))


def estimate(plan: Outline, sizes: Sizes, hardware: Hardware, length: int | None = None) -> Estimate:
    """Time a plan on a machine, at its own length or with its mask stretched to another length.

    Args:
        plan: from `outline`.
        sizes, hardware: as for `simulate`.
        length: tokens of the whole sequence.
    """
    stretch, ranks = 1.0 if length is None else length / plan.length, range(plan.ranks)
    row = {name: sum(sizes.row_bytes(name)) for name in {name for parts in plan.contents for name, _ in parts}}
    nbytes = [round(stretch * sum(row[name] * tokens for name, tokens in parts)) for parts in plan.contents]
    merged = [sum(name in plan.phase.write_names for name, _ in parts) for parts in plan.contents]
    link, network = hardware.link, hardware.network or hardware.link
    seconds = [(link.seconds(size), network.seconds(size)) for size in nbytes]
    node = [hardware.node(rank) for rank in ranks]
    took = _kernel_seconds(plan, sizes, hardware, stretch)
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


def _kernel_seconds(plan: Outline, sizes: Sizes, hardware: Hardware, stretch: float) -> dict[tuple[int, ...], float]:
    """Return the seconds of one kernel call over (pairs, rows of queries, rows of keys), stretched."""
    flops, heads = sizes.flops_per_pair(plan.phase), sizes.batch * sizes.heads
    found: dict[tuple[int, ...], float] = {}
    for pairs, queries, keys in {tuple(call) for step in plan.work for _, *call in step}:
        area = pairs * stretch**2
        rate = hardware.rate(plan.phase.name, area, round(queries * stretch), round(keys * stretch), heads)
        found[pairs, queries, keys] = hardware.launch_overhead + area * flops / rate
    return found
