"""Reduce a plan to work per rank and messages per pair and step, and time that on many machines and sizes.

`simulate` lowers a plan to programs and runs them; this module reads blocks and transfers only. Blocks of one step that
read the same buffers count as one kernel call. A batch waits for the compute of the step before (two buffers per side),
and merges cost nothing. A test holds it to a few per cent of `simulate`. It serves hundreds of ranks at many lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from dfa_megatron.plan.cost.hardware import Hardware
from dfa_megatron.plan.language.ir import Phase, Plan, areas
from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.plan.lowering.messages import joined

Parts = tuple[tuple[str, int], ...]
"""(name, tokens) of each part of a message."""


@dataclass(frozen=True, slots=True)
class Outline:
    """One phase, by step.

    work: (rank, token pairs, rows of queries or of keys that a kernel shares out) of calls. messages: (source,
    destination, index into `parts`).
    """

    phase: Phase
    ranks: int
    length: int
    work: tuple[tuple[tuple[int, int, int], ...], ...]
    messages: tuple[tuple[tuple[int, int, int], ...], ...]
    parts: tuple[Parts, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a run.

    seconds: of the devices; host_seconds: of the slowest rank's host, beside them. idle_share: of all ranks' time.
    link_bytes, network_bytes: the most that a rank sends over its link and over its network adapter.
    """

    seconds: float
    idle_share: float
    link_bytes: int
    network_bytes: int
    host_seconds: float = 0.0


def outline(plan: Plan, batch: int = 1) -> Outline:
    """Return the outline of a plan for `batch` sequences at once."""
    steps, rows = plan.steps, [len(chunk) for chunk in plan.layout.chunks]
    area = areas(plan.mask, plan.layout)
    together = joined(plan.mask, batch)
    work: list[dict[tuple[int, ...], int]] = [defaultdict(int) for _ in range(steps)]
    shared: list[dict[tuple[int, ...], set[int]]] = [defaultdict(set) for _ in range(steps)]
    is_forward, owner = plan.phase.name == "forward", plan.layout.owner
    joins_q, joins_kv = plan.phase.read_q in together, plan.phase.read_kv in together
    for block in plan.blocks:
        rank, q, kv = block.rank, block.q_chunk, block.kv_chunk
        call = rank, _memory(owner[q], rank, joins_q), _memory(owner[kv], rank, joins_kv)
        work[block.step][call] += area[q, kv]
        shared[block.step][call].add(q if is_forward else kv)
    sent: list[dict[tuple[int, int], dict[str, int]]] = [{} for _ in range(steps)]
    for t in plan.transfers:
        tokens = sent[t.step].setdefault((t.src, t.dst), {})
        tokens[t.what] = tokens.get(t.what, 0) + rows[t.chunk]
    numbers: dict[Parts, int] = {}
    # By distance, so that messages that use different ports come next to each other.
    messages = [
        sorted(
            ((src, dst, numbers.setdefault(tuple(parts.items()), len(numbers))) for (src, dst), parts in step.items()),
            key=lambda message: ((message[1] - message[0]) % plan.ranks, message[0]),
        )
        for step in sent
    ]
    return Outline(
        plan.phase,
        plan.ranks,
        plan.mask.length,
        tuple(
            tuple((call[0], pairs, sum(rows[chunk] for chunk in chunks[call])) for call, pairs in step.items())
            for step, chunks in zip(work, shared, strict=True)
        ),
        tuple(map(tuple, messages)),
        tuple(numbers),
    )


def _memory(owner: int, rank: int, is_joined: bool) -> int:
    """Return the buffer that holds a chunk: the rank's own, one per source rank, or one for all other ranks."""
    return -1 if owner != rank and is_joined else owner


def estimate(plan: Outline, shape: AttentionShape, hardware: Hardware, length: int | None = None) -> Estimate:
    """Time a plan on a machine, at its own length or with its mask stretched to another length.

    Args:
        plan: from `outline`.
        shape, hardware: as for `simulate`.
        length: tokens of the whole sequence.
    """
    stretch = 1.0 if length is None else length / plan.length
    row = {name: bytes_of(name, 1, shape) for name in {name for parts in plan.parts for name, _ in parts}}
    nbytes = [round(stretch * sum(row[name] * tokens for name, tokens in parts)) for parts in plan.parts]
    link, network = hardware.link, hardware.network or hardware.link
    seconds = [(link.seconds(size), network.seconds(size)) for size in nbytes]
    node = [hardware.node(rank) for rank in range(plan.ranks)]
    sent = [[0] * plan.ranks, [0] * plan.ranks]
    took = _kernel_seconds(plan, shape, hardware, stretch)
    done, ended, delivered, busy = ([0.0] * plan.ranks for _ in range(4))
    for step, (work, messages) in enumerate(zip(plan.work, plan.messages, strict=True)):
        posted = [max(pair) for pair in zip(delivered, ended, strict=True)] if step > 1 else delivered
        ports = (posted.copy(), posted.copy()), (posted.copy(), posted.copy())
        for src, dst, number in messages:
            far = node[src] != node[dst]
            sending, receiving = ports[far]
            start, end = sending[src], receiving[dst]
            sending[src] = receiving[dst] = (start if start > end else end) + seconds[number][far]
            sent[far][src] += nbytes[number]
        for rank, *call in work:
            done[rank] += took[*call]
            busy[rank] += took[*call]
        ended = done.copy()
        if messages:
            delivered = [max(times) for times in zip(*ports[0], *ports[1], strict=True)]
            done = [max(pair) for pair in zip(done, delivered, strict=True)]
    makespan = max(done)
    idle = 1 - math.fsum(busy) / (plan.ranks * makespan)
    return Estimate(makespan, idle, max(sent[0]), max(sent[1]), _host_seconds(plan, hardware))


def _host_seconds(plan: Outline, hardware: Hardware) -> float:
    """Return the time of the slowest host; each message is posted and received."""
    calls, messages = [0] * plan.ranks, [0] * plan.ranks
    for work in plan.work:
        for rank, _, _ in work:
            calls[rank] += 1
    for step in plan.messages:
        for src, dst, _ in step:
            messages[src] += 1
            messages[dst] += 1
    return max(hardware.host.seconds(calls[rank], 0, messages[rank]) for rank in range(plan.ranks))


def _kernel_seconds(
    plan: Outline, shape: AttentionShape, hardware: Hardware, stretch: float
) -> dict[tuple[int, ...], float]:
    """Return the seconds of one kernel call over (pairs, rows), stretched."""
    flops, heads = shape.flops_per_pair(plan.phase), shape.batch * shape.heads
    found: dict[tuple[int, ...], float] = {}
    for pairs, rows in {tuple(call) for step in plan.work for _, *call in step}:
        area = pairs * stretch**2
        rate = hardware.rate(plan.phase.name, area, round(rows * stretch), heads)
        found[pairs, rows] = hardware.launch_overhead + area * flops / rate
    return found
