"""The plan language: blocks say who computes what and when, transfers move chunks or accumulators between ranks.

The rules (R):

- R1 A transfer of step s carries what its source held before s's compute, overlaps it, and is usable from s+1.
- R2 A block of step s reads home chunks, or chunks landed before s.
- R3 Transferring a *write* name (out, dq, dkv) moves the accumulator: the source is empty afterwards, the destination
  merges what lands. An accumulator that is at home stays there.
- R4 At the end every accumulator is at home and holds every needed (q, kv) pair exactly once; nothing is stranded.
- R5 Each rank posts one batch per step in one global order, one message per peer. By induction on the step there is no
  deadlock.

A plan is pure data: no tensor, no process group, no stream and no kernel.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """At `step`, `rank` computes the pairs of (q_chunk, kv_chunk) that the mask holds."""

    step: int
    rank: int
    q_chunk: int
    kv_chunk: int


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """At `step`, `what` of `chunk` goes from src to dst: one record per message part, so a send has its receive."""

    step: int
    src: int
    dst: int
    what: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What one block reads and writes: names for its q side and its kv side; a side that is not written is empty."""

    name: str
    read_q: str
    read_kv: str
    write_q: str
    write_kv: str

    @property
    def reads(self) -> tuple[tuple[str, str], ...]:
        """(side, name) of what a block reads."""
        return ("q", self.read_q), ("kv", self.read_kv)

    @property
    def writes(self) -> tuple[tuple[str, str], ...]:
        """(side, name) of what a block writes."""
        return tuple((side, name) for side, name in (("q", self.write_q), ("kv", self.write_kv)) if name)

    @property
    def write_names(self) -> tuple[str, ...]:
        """The names of accumulators."""
        return tuple(name for _, name in self.writes)


FORWARD = Phase("forward", read_q="q", read_kv="kv", write_q="out", write_kv="")
BACKWARD = Phase("backward", read_q="qdo", read_kv="kv", write_q="dq", write_kv="dkv")
PHASES = {phase.name: phase for phase in (FORWARD, BACKWARD)}


def chunk_of(block: Block, side: str) -> int:
    """The block's chunk on its q or kv side."""
    return block.q_chunk if side == "q" else block.kv_chunk


Pairs = Mapping[tuple[int, int], tuple[Tile, ...]]
"""(q_chunk, kv_chunk) -> the tiles of the mask in it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One phase of a distributed attention: everything that happens on every rank, as data."""

    mask: Mask
    layout: Layout
    phase: Phase
    blocks: tuple[Block, ...]
    transfers: tuple[Transfer, ...]
    _pairs: Pairs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pairs", needed_pairs(self.mask, self.layout))

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.layout.ranks

    @property
    def steps(self) -> int:
        """How many steps there are, those with transfers only counted in."""
        records: tuple[Block | Transfer, ...] = (*self.blocks, *self.transfers)
        return 1 + max((record.step for record in records), default=-1)

    def tiles(self, block: Block) -> tuple[Tile, ...]:
        """The pairs of a block as tiles in global positions."""
        return self._pairs.get((block.q_chunk, block.kv_chunk), ())

    @property
    def digest(self) -> str:
        """A short hash of everything in the plan; equal digests are equal plans."""
        return hashlib.sha256(to_text(self).encode()).hexdigest()[:16]


@lru_cache(maxsize=32)
def needed_pairs(mask: Mask, layout: Layout) -> Pairs:
    """The tiles of every (q_chunk, kv_chunk) pair in which the mask holds at least one token pair."""
    pairs: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    order = sorted(range(len(layout.chunks)), key=lambda chunk: (layout.chunks[chunk].lo, layout.chunks[chunk].hi))
    starts = [layout.chunks[chunk].lo for chunk in order]

    def overlapping(span: Span) -> list[int]:
        first = max(0, bisect_right(starts, span.lo) - 1)
        return order[first : bisect_left(starts, span.hi)]

    for tile in mask.tiles:
        columns = overlapping(tile.kv)
        for q in overlapping(tile.q):
            for kv in columns:
                if part := tile.restrict(layout.chunks[q], layout.chunks[kv]):
                    pairs[q, kv].append(part)
    return MappingProxyType({pair: tuple(pairs[pair]) for pair in sorted(pairs)})


def to_text(plan: Plan) -> str:
    """The plan as text that people can read and `from_text` can parse."""
    tiles = [[t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.lo, t.hi] for t in plan.mask.tiles]
    lines = [
        _header(plan),
        "mask " + json.dumps({"name": plan.mask.name, "length": plan.mask.length, "tiles": tiles}),
        "chunks "
        + " ".join(f"{c.lo}:{c.hi}@{home}" for c, home in zip(plan.layout.chunks, plan.layout.home, strict=True)),
    ]
    body: dict[int, list[str]] = defaultdict(list)
    for b in sorted(plan.blocks):
        body[b.step].append(f"  block {b.rank} {b.q_chunk} {b.kv_chunk}")
    for t in sorted(plan.transfers):
        body[t.step].append(f"  move {t.src} {t.dst} {t.what} {t.chunk}")
    for step in sorted({*range(plan.steps), *body}):
        lines += [f"step {step}", *body[step]]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Plan:
    """Parse what `to_text` wrote; blocks and transfers come back sorted.

    Raises:
        PlanError: a line is not of the language; the message quotes it.
    """
    phase, mask, layout, step, header = None, None, None, -1, ""
    blocks: list[Block] = []
    transfers: list[Transfer] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            match line.split(maxsplit=1)[0], line.split():
                case "plan", [_, name, *_] if phase is None:
                    phase, header = PHASES[name], line
                case "mask", _ if mask is None:
                    mask = _parse_mask(json.loads(line.split(maxsplit=1)[1]))
                case "chunks", words if layout is None:
                    layout = _parse_layout(words[1:])
                case "step", [_, value]:
                    step = int(value)
                case "block", [_, rank, q_chunk, kv_chunk]:
                    blocks.append(Block(step, int(rank), int(q_chunk), int(kv_chunk)))
                case "move", [_, src, dst, what, chunk]:
                    transfers.append(Transfer(step, int(src), int(dst), what, int(chunk)))
                case _:
                    raise ValueError("an unknown record, or a second one of a kind that a plan has once")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PlanError(f"line {number} of the plan's text cannot be read: {line!r} ({error})") from error
    if phase is None or mask is None or layout is None:
        raise PlanError("the plan's text lacks its plan, mask or chunks line")
    plan = Plan(mask, layout, phase, tuple(sorted(blocks)), tuple(sorted(transfers)))
    if header != _header(plan):
        raise PlanError(f"the plan's text says {header!r}, but what follows is {_header(plan)!r}")
    return plan


def _header(plan: Plan) -> str:
    return f"plan {plan.phase.name} ranks={plan.ranks} steps={plan.steps}"


def _parse_mask(value: dict[str, Any]) -> Mask:
    tiles = tuple(Tile(Span(a, b), Span(c, d), lo, hi) for a, b, c, d, lo, hi in value["tiles"])
    return Mask(str(value["name"]), int(value["length"]), tiles)


def _parse_layout(words: list[str]) -> Layout:
    spans, homes = [], []
    for word in words:
        span, home = word.split("@")
        lo, hi = span.split(":")
        spans.append(Span(int(lo), int(hi)))
        homes.append(int(home))
    return Layout(tuple(spans), tuple(homes))
