"""Group a plan's blocks and messages by rank and step. Both ends of a message get the same grouping."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from dfa_megatron.plan.language.ir import Block, Plan
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.validate import validate

Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""(name, chunks) of each part of a message, in one order for source and destination."""

JOINABLE = frozenset(("q", "kv"))
"""Names without statistics: a slice of rows is contiguous in (1, rows, heads, width), but not in (1, heads, rows)."""


def joined(mask: Mask, batch: int) -> frozenset[str]:
    """Names (q, kv) that a rank receives into one buffer per step, sorted by token position, whoever sends them.

    One kernel call can then read all parts of a document, and several documents. This saves calls if the mask has
    several tiles. It needs a batch of one: the rows of a message are contiguous in the buffer for one sequence only.
    """
    return JOINABLE if batch == 1 and len(mask.tiles) > 1 else frozenset()


@dataclass(slots=True)
class RankMessages:
    """Blocks and messages of one rank. incoming, outgoing: step -> peer -> parts of the message."""

    blocks: dict[int, list[Block]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[int, dict[int, Parts]] = field(default_factory=lambda: defaultdict(dict))
    outgoing: dict[int, dict[int, Parts]] = field(default_factory=lambda: defaultdict(dict))


def rank_messages(plan: Plan, batch: int) -> list[RankMessages]:
    """Return the messages of every rank.

    Raises:
        PlanError: a record of the plan cannot run on any rank, see `validate`.
    """
    validate(plan)
    out = [RankMessages() for _ in range(plan.ranks)]
    for block in sorted(plan.blocks):
        out[block.rank].blocks[block.step].append(block)
    sent: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(dict)
    for step, src, dst, what, chunk in sorted(plan.transfers):
        sent[step, src, dst].setdefault(what, []).append(chunk)
    runs = _runs(plan, sent, joined(plan.mask, batch))
    for (step, src, dst), names in sent.items():
        parts = tuple(
            (name, chunks)
            for name, unjoined in names.items()
            for chunks in runs.get((step, src, dst, name), [tuple(unjoined)])
        )
        out[src].outgoing[step][dst] = out[dst].incoming[step][src] = parts
    return out


def _runs(
    plan: Plan, sent: dict[tuple[int, int, int], dict[str, list[int]]], together: frozenset[str]
) -> dict[tuple[int, int, int, str], list[tuple[int, ...]]]:
    """Return (step, source, destination, joined name) -> one tuple of chunks per part that lands in adjacent rows."""
    arriving: dict[tuple[int, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for (step, src, dst), names in sent.items():
        for name, chunks in names.items():
            if name in together:
                arriving[step, dst, name] += [(plan.layout.chunks[chunk].lo, src, chunk) for chunk in chunks]
    runs: dict[tuple[int, int, int, str], list[tuple[int, ...]]] = defaultdict(list)
    for (step, dst, name), landing in arriving.items():
        for src, run in groupby(sorted(landing), key=itemgetter(1)):
            runs[step, src, dst, name].append(tuple([chunk for _, _, chunk in run]))
    return runs
