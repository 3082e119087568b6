"""Group a plan's blocks and messages by rank and step. Both ends of a message get the same grouping."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
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


REMEMBERED_RANKS = 64
"""What is derived from larger plans takes too much memory to cache."""


class Same:
    """A plan as a cache key by identity: comparing its contents takes as long as lowering it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.plan is self.plan


def rank_messages(plan: Plan, batch: int) -> list[RankMessages]:
    """Return the messages of every rank.

    Raises:
        PlanError: a record of the plan cannot run on any rank, see `validate`.
    """
    return (_rank_messages if plan.ranks <= REMEMBERED_RANKS else _rank_messages.__wrapped__)(Same(plan), batch)


@lru_cache(maxsize=1)  # the landings of a phase and its proof ask for them in turn
def _rank_messages(same: Same, batch: int) -> list[RankMessages]:
    plan = same.plan
    validate(plan)
    out = [RankMessages() for _ in range(plan.ranks)]
    for block in sorted(plan.blocks):
        out[block.rank].blocks[block.step].append(block)
    sent: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(dict)
    for t in sorted(plan.transfers):  # by step, source, destination, name and chunk
        sent[t.step, t.src, t.dst].setdefault(t.what, []).append(t.chunk)
    runs = _runs(plan, sent, joined(plan.mask, batch))
    for (step, src, dst), names in sent.items():
        parts = tuple(
            (name, chunks)
            for name, unjoined in names.items()
            for chunks in runs.get((step, src, dst, name), [tuple(unjoined)])
        )
        out[src].outgoing[step][dst] = out[dst].incoming[step][src] = parts
    return out


def forget_messages() -> None:
    """Drop the messages of the last plan, see `forget_landings`."""
    _rank_messages.cache_clear()


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
