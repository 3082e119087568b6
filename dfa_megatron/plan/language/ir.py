"""The plan language: blocks assign work to ranks and steps, transfers move chunks or accumulators between ranks.

The rules (R):

- R1 A transfer of step s carries what its source held before s's compute, overlaps it, and is usable from s+1.
- R2 A block of step s reads chunks that its rank owns, or chunks landed before s.
- R3 Transferring a *write* name (out, dq, dkv) moves the accumulator: the source is empty afterwards, the destination
  merges what lands. An accumulator at its owner stays there.
- R4 At the end every accumulator is at its owner and holds every needed (q, kv) pair exactly once; nothing is stranded.
- R5 Each rank posts one batch per step in one global order, one message per peer. By induction on the step there is no
  deadlock.

A plan is pure data: no tensor, no process group, no stream and no kernel.
"""

from __future__ import annotations

import hashlib
import marshal
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.leaves import Grid, LeafSizes, grid_of
from dfa_megatron.plan.language.mask import Mask, kept_on_mask


class Block(NamedTuple):
    """At `step`, `rank` computes the pairs of (q_chunk, kv_chunk) that the mask holds."""

    step: int
    rank: int
    q_chunk: int
    kv_chunk: int


class Transfer(NamedTuple):
    """At `step`, `what` of `chunk` goes from src to dst. One record per message part, so each send has its receive."""

    step: int
    src: int
    dst: int
    what: str
    chunk: int


@dataclass(frozen=True)
class Phase:
    """Names that one block reads and writes on its q side and its kv side; empty for a side that is not written.

    reads, writes: (side, name) of each input and of each result of a block. write_names: names of accumulators.
    """

    name: str
    read_q: str
    read_kv: str
    write_q: str
    write_kv: str

    @cached_property
    def reads(self) -> tuple[tuple[str, str], ...]:  # noqa: D102
        return ("q", self.read_q), ("kv", self.read_kv)

    @cached_property
    def writes(self) -> tuple[tuple[str, str], ...]:  # noqa: D102
        return tuple((side, name) for side, name in (("q", self.write_q), ("kv", self.write_kv)) if name)

    @cached_property
    def write_names(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(name for _, name in self.writes)


FORWARD = Phase("forward", read_q="q", read_kv="kv", write_q="out", write_kv="")
BACKWARD = Phase("backward", read_q="qdo", read_kv="kv", write_q="dq", write_kv="dkv")
PHASES = {phase.name: phase for phase in (FORWARD, BACKWARD)}


def chunk_of(block: Block, side: str) -> int:
    """Return the block's chunk on its q or kv side."""
    return block.q_chunk if side == "q" else block.kv_chunk


Pairs = Mapping[tuple[int, int], tuple[Tile, ...]]
"""(q_chunk, kv_chunk) -> the tiles of the mask in it."""


@dataclass(frozen=True)
class Plan:
    """One phase of a distributed attention: everything that happens on every rank, as data.

    pairs: of chunks that the mask needs, with their tiles; it follows from mask and layout.
    steps: their number, including steps with transfers only.
    leaves: where results merge in a fixed order, the sizes of its chunks; None where they merge as they come.
    """

    mask: Mask
    layout: Layout
    phase: Phase
    blocks: tuple[Block, ...]
    transfers: tuple[Transfer, ...]
    leaves: LeafSizes | None = None

    @cached_property
    def pairs(self) -> Pairs:  # noqa: D102
        return needed_pairs(self.mask, self.layout.chunks)

    @cached_property
    def steps(self) -> int:  # noqa: D102
        return 1 + max((record.step for records in (self.blocks, self.transfers) for record in records), default=-1)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.mask, self.layout, self.phase, self.blocks, self.transfers, self.leaves
        return Plan, fields  # what follows from it stays

    def __hash__(self) -> int:
        # Every call of an attention looks its plan up, which may have thousands of blocks.
        return hash((self.mask, self.layout, self.phase, len(self.blocks), len(self.transfers), self.steps))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.layout.ranks

    @property
    def phases(self) -> tuple[Plan, ...]:
        """Return this phase alone, as `AttentionPlan.phases` returns both."""
        return (self,)

    @cached_property
    def order(self) -> Grid | None:
        """The grid in whose order results merge; None where they merge as they come."""
        return None if self.leaves is None else grid_of(self.mask, self.leaves)

    def tiles(self, block: Block) -> tuple[Tile, ...]:
        """Return the pairs of a block as tiles in global positions."""
        return self.pairs.get((block.q_chunk, block.kv_chunk), ())

    @property
    def digest(self) -> str:
        """Return a short hash of everything in the plan; equal digests are equal plans."""
        told: list[object] = [self.phase.name, self.mask.name, self.mask.length, self.layout.owner]
        told += [self.layout.ranks, self.layout.queries if self.layout.queries is not None else -1]
        told += [(t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.lo, t.hi) for t in self.mask.tiles]
        told += [(chunk.lo, chunk.hi) for chunk in self.layout.chunks]
        told += [] if self.leaves is None else [("leaves", self.leaves.least, self.leaves.usual)]
        for records in (self.blocks, self.transfers):
            told += len(records), list(chain.from_iterable(sorted(records)))
        return hashlib.sha256(marshal.dumps(told, 0)).hexdigest()[:16]  # version 0 depends on values only


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A forward and a backward of one schedule, mask and layout.

    Attributes:
        schedule: its name.
        layout: the name of the layout, which says the tokens that a rank holds.
        forward, backward: the plans of its phases.
        ranks_per_node: of the nodes that its routes cross to once, or None where the routes know no nodes.
    """

    schedule: str
    layout: str
    forward: Plan
    backward: Plan
    ranks_per_node: int | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.forward.ranks

    @property
    def phases(self) -> tuple[Plan, ...]:
        """Return the phases in the order in which they run."""
        return self.forward, self.backward

    @property
    def digest(self) -> str:
        """Return a short hash of both phases."""
        return f"{self.forward.digest}-{self.backward.digest}"

    def __str__(self) -> str:
        nodes = f", nodes of {self.ranks_per_node}" if self.ranks_per_node is not None else ""
        mask = self.forward.mask
        return f"{self.schedule} of {mask.name} over {mask.length} tokens on {self.ranks} ranks{nodes}"


@kept_on_mask
def needed_pairs(mask: Mask, chunks: tuple[Span, ...]) -> Pairs:
    """Return the tiles of every (q_chunk, kv_chunk) pair in which the mask holds at least one token pair."""
    pairs: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    order = sorted(range(len(chunks)), key=lambda chunk: (chunks[chunk].lo, chunks[chunk].hi))
    starts = [chunks[chunk].lo for chunk in order]

    def overlapping(lo: int, hi: int) -> list[int]:
        return order[max(0, bisect_right(starts, lo) - 1) : bisect_left(starts, hi)]

    for tile in mask.tiles:
        (first, end), lo, hi = (tile.kv.lo, tile.kv.hi), tile.lo, tile.hi
        columns = overlapping(first, end)
        own = columns if tile.q is tile.kv else overlapping(tile.q.lo, tile.q.hi)
        if len(own) == len(columns) == 1:  # most documents
            pairs[own[0], columns[0]].append(tile)
            continue
        for q in own:
            rows = chunks[q] & tile.q
            # Every row sees the keys from `begin` to `until`, which need no look at the diagonals.
            begin, until = max(first, rows.hi - 1 + lo), min(end, rows.lo + hi + 1)
            for kv in columns if len(columns) < 4 else overlapping(max(first, rows.lo + lo), min(end, rows.hi + hi)):
                keys = chunks[kv]
                if begin <= keys.lo < keys.hi <= until and rows.lo < rows.hi:
                    pairs[q, kv].append(Tile(rows, keys))
                elif part := tile.restrict(rows, keys):
                    pairs[q, kv].append(part)
    return MappingProxyType({pair: tuple(pairs[pair]) for pair in sorted(pairs)})


@kept_on_mask
def areas(mask: Mask, chunks: tuple[Span, ...]) -> Mapping[tuple[int, int], int]:
    """Return the number of token pairs in every (q_chunk, kv_chunk) pair of `needed_pairs`."""
    needed = needed_pairs(mask, chunks)
    return MappingProxyType({pair: sum(tile.area for tile in tiles) for pair, tiles in needed.items()})


def loads(blocks: Iterable[Block], mask: Mask, layout: Layout) -> list[int]:
    """Return the token pairs that each rank computes."""
    area, load = areas(mask, layout.chunks), [0] * layout.ranks
    for _, rank, q, kv in blocks:
        load[rank] += area[q, kv]
    return load
