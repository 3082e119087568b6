"""What one rank runs: a flat list of steps over numbered buffers, lowered from a plan and checked in this form."""

from __future__ import annotations

from dataclasses import dataclass

from dfa_megatron.plan.language.geometry import Segment
from dfa_megatron.plan.language.ir import Block, Phase


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of one or several names that live together.

    parts: (name, rows) in order. slot: the memory it lies in; buffers of one slot never live at the same time. A home
    buffer has no slot: it is an input or a result of the call. `accumulates` tells an accumulator (in the accumulator's
    dtype) from a message as it came off the wire; the two share no slot.
    """

    parts: tuple[tuple[str, int], ...]
    slot: int | None
    accumulates: bool


@dataclass(frozen=True, slots=True)
class Region:
    """Rows lo..hi of one name in one buffer."""

    buffer: int
    name: str
    lo: int
    hi: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.hi - self.lo


@dataclass(frozen=True, slots=True)
class Message:
    """All that goes between this rank and one peer in one step, as one piece on the wire.

    Each part is a name whose rows are the given regions, one after another; a received part is one region.
    """

    peer: int
    parts: tuple[tuple[Region, ...], ...]

    @property
    def signature(self) -> tuple[tuple[str, int], ...]:
        """(name, rows) of each part: equal on both ends."""
        return tuple((regions[0].name, sum(region.rows for region in regions)) for regions in self.parts)


@dataclass(frozen=True, slots=True)
class Write:
    """Where a result goes; `fresh` means that no row of the region holds anything yet, so it is stored, not merged."""

    region: Region
    fresh: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call over rows of a q and a kv buffer, and where its results go (one write per name of the phase).

    The rows of its segments increase on both sides and are disjoint. A row between segments has the identity of the
    merge as its result. A call of one segment has no other rows.
    """

    q: Region
    kv: Region
    segments: tuple[Segment, ...]
    writes: tuple[Write, ...]
    blocks: tuple[Block, ...]
    area: int


@dataclass(frozen=True, slots=True)
class Merge:
    """A landed partial result goes into an accumulator."""

    source: Region
    write: Write


@dataclass(frozen=True, slots=True)
class Step:
    """Post the messages, compute while they travel, then land them.

    after: the last step whose compute must be over before this step's messages may move (-1: none), because it wrote
    what is sent or read what is overwritten.
    """

    after: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    opens: tuple[int, ...]
    calls: tuple[Call, ...]
    merges: tuple[Merge, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's whole phase. Buffers 0.. are home: the phase's reads in order, then its writes."""

    rank: int
    ranks: int
    phase: Phase
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def home_buffer(self, name: str) -> int:
        """The number of the buffer that holds this rank's own rows of a name."""
        names = [read for _, read in self.phase.reads] + list(self.phase.write_names)
        return names.index(name)

    @property
    def slots(self) -> dict[int, tuple[Buffer, ...]]:
        """Memory to allocate: each slot with the buffers that live in it, one after another."""
        tenants: dict[int, tuple[Buffer, ...]] = {}
        for buffer in self.buffers:
            if buffer.slot is not None:
                tenants[buffer.slot] = (*tenants.get(buffer.slot, ()), buffer)
        return tenants

    @property
    def sends(self) -> tuple[Message, ...]:
        """Every message this rank sends."""
        return tuple(message for step in self.steps for message in step.sends)

    def peak_slots(self) -> dict[str, int]:
        """In how many slots remote chunks of each name live on this rank, messages and accumulators together."""
        peak: dict[str, int] = {}
        for buffers in self.slots.values():
            for name in {name for buffer in buffers for name, _ in buffer.parts}:
                peak[name] = peak.get(name, 0) + 1
        return peak
