"""Reduce a plan to work per rank and messages per pair and step, and time that on many machines and sizes.

`simulate` lowers a plan to programs and runs them; this module reads blocks and transfers only. Blocks of one step that
read the same buffers count as one kernel call. A batch waits for the compute of the step before (two buffers per side),
and merges cost nothing. A test holds it to a few per cent of `simulate`. It serves hundreds of ranks at many lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from dfa_megatron.plan.cost.hardware import RATED_HEADS, Hardware
from dfa_megatron.plan.language.ir import Phase, Plan, chunk_of, needed_pairs
from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.plan.lowering.messages import joined

Parts = tuple[tuple[str, int], ...]
"""(name, tokens) of each part of a message."""


@dataclass(frozen=True, slots=True)
class Outline:
    """One phase, by step. work: (rank, token pairs) of calls; messages: (source, destination, index into `parts`)."""

    phase: Phase
    ranks: int
    length: int
    work: tuple[tuple[tuple[int, int], ...], ...]
    messages: tuple[tuple[tuple[int, int, int], ...], ...]
    parts: tuple[Parts, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a run: seconds, the idle share of all ranks' time, and the most bytes that a rank sends over its
    link and over its network adapter.
    """

    seconds: float
    idle_share: float
    link_bytes: int
    network_bytes: int


def outline(plan: Plan, batch: int = 1) -> Outline:
    """Return the outline of a plan for `batch` sequences at once."""
    steps, rows = plan.steps, [len(chunk) for chunk in plan.layout.chunks]
    area = {pair: sum(tile.area for tile in tiles) for pair, tiles in needed_pairs(plan.mask, plan.layout).items()}
    together = joined(plan.mask, batch)
    work: list[dict[tuple[int, ...], int]] = [defaultdict(int) for _ in range(steps)]
    for block in plan.blocks:
        call = (
            block.rank,
            *(
                _memory(plan.layout.owner[chunk_of(block, side)], block.rank, name in together)
                for side, name in plan.phase.reads
            ),
        )
        work[block.step][call] += area[block.q_chunk, block.kv_chunk]
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
        tuple(tuple((call[0], pairs) for call, pairs in step.items()) for step in work),
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
    nbytes = [round(stretch * sum(bytes_of(name, tokens, shape) for name, tokens in parts)) for parts in plan.parts]
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
        for rank, pairs in work:
            done[rank] += took[pairs]
            busy[rank] += took[pairs]
        ended = done.copy()
        if messages:
            delivered = [max(times) for times in zip(*ports[0], *ports[1], strict=True)]
            done = [max(pair) for pair in zip(done, delivered, strict=True)]
    makespan = max(done)
    return Estimate(makespan, 1 - math.fsum(busy) / (plan.ranks * makespan), max(sent[0]), max(sent[1]))


def _kernel_seconds(plan: Outline, shape: AttentionShape, hardware: Hardware, stretch: float) -> dict[int, float]:
    """Return the seconds of one kernel call over `pairs` pairs, stretched."""
    flops, heads = shape.flops_per_pair(plan.phase), shape.batch * shape.heads / RATED_HEADS
    found = {}
    for pairs in {pairs for step in plan.work for _, pairs in step}:
        area = pairs * stretch**2
        found[pairs] = hardware.launch_overhead + area * flops / hardware.rate(plan.phase.name, area * heads)
    return found
