"""A rank's share of a plan: its blocks and its messages, step by step; grouped once for all ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby

from dfa_megatron.plan.language.ir import Block, Plan
from dfa_megatron.plan.language.mask import Mask

Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""What one message carries: the name and the chunks of each part, in an order that source and destination agree on."""

JOINABLE = frozenset(("q", "kv"))
"""Names without statistics: some rows of (1, rows, heads, width) are dense, some of (1, heads, rows) are not."""


def joined(mask: Mask, batch: int) -> frozenset[str]:
    """Names (q, kv) that a rank receives into one buffer per step, sorted by token position, whoever sends them.

    One kernel call can then read all parts of a document, and several documents. It pays where the mask has several
    tiles. It needs a batch of one: a message lands in some rows of the buffer, which are dense for one sequence only.
    """
    return JOINABLE if batch == 1 and len(mask.tiles) > 1 else frozenset()


@dataclass(slots=True)
class RankMessages:
    """What a plan says about one rank. incoming, outgoing: step -> peer -> cargo."""

    blocks: dict[int, list[Block]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[int, dict[int, Parts]] = field(default_factory=lambda: defaultdict(dict))
    outgoing: dict[int, dict[int, Parts]] = field(default_factory=lambda: defaultdict(dict))


def rank_messages(plan: Plan, batch: int) -> list[RankMessages]:
    """The share of every rank; the plan's records must name ranks that exist."""
    out = [RankMessages() for _ in range(plan.ranks)]
    for block in sorted(plan.blocks):
        out[block.rank].blocks[block.step].append(block)
    cargos: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(dict)
    for t in sorted(plan.transfers):  # by step, source, destination, name and chunk
        cargos[t.step, t.src, t.dst].setdefault(t.what, []).append(t.chunk)
    parts = _runs(plan, cargos, joined(plan.mask, batch))
    for (step, src, dst), names in cargos.items():
        cargo = tuple(
            (name, chunks)
            for name, alone in names.items()
            for chunks in parts.get((step, src, dst, name), [tuple(alone)])
        )
        out[src].outgoing[step][dst] = out[dst].incoming[step][src] = cargo
    return out


def _runs(
    plan: Plan, cargos: dict[tuple[int, int, int], dict[str, list[int]]], together: frozenset[str]
) -> dict[tuple[int, int, int, str], list[tuple[int, ...]]]:
    """(step, source, destination, joined name) -> the chunks that land one after another, as a part each."""
    arriving: dict[tuple[int, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for (step, src, dst), names in cargos.items():
        for name in together & names.keys():
            arriving[step, dst, name] += [(plan.layout.chunks[chunk].lo, src, chunk) for chunk in names[name]]
    runs: dict[tuple[int, int, int, str], list[tuple[int, ...]]] = defaultdict(list)
    for (step, dst, name), chunks in arriving.items():
        for src, run in groupby(sorted(chunks), key=lambda chunk: chunk[1]):
            runs[step, src, dst, name].append(tuple(chunk for _, _, chunk in run))
    return runs
