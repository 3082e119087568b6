"""Find where the messages of a rank land, by buffer and by byte, and how long they stay, before any call is known.

It follows from blocks and messages alone. So every rank knows where its messages go in the memory of any other rank,
and lowers no program but its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dfa_megatron.plan.language.grid import plan_error
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Buffer, Region
from dfa_megatron.plan.lowering.messages import Parts, RankMessages, names_joined, rank_messages


@dataclass(slots=True)
class Life:
    """The steps in which a buffer is first touched, last read or written by compute, and last sent on."""

    begin: int
    computed: int = -1
    moved: int = -1

    @property
    def end(self) -> int:
        """Return the last step of the buffer's life."""
        return max(self.begin, self.computed, self.moved)


def assign_slots(buffers: Sequence[tuple[tuple[str, int], ...]], lives: Sequence[Life]) -> list[int]:
    """Assign each buffer, given by its parts, a slot: the free one nearest in size, else a new one.

    A slot is as large as its largest buffer. Messages and accumulators share none, so each kind is assigned by itself.
    """
    slots = [-1] * len(buffers)
    free_from: list[int] = []
    sizes: list[int] = []
    for begin, end, number in sorted([(life.begin, life.end, number) for number, life in enumerate(lives)]):
        size = sum(rows * _TENSORS[name] for name, rows in buffers[number])
        usable = [(abs(sizes[slot] - size), to, slot) for slot, to in enumerate(free_from) if to < begin]
        if usable:
            *_, slot = min(usable)
            free_from[slot], sizes[slot] = end, max(sizes[slot], size)
        else:
            slot = len(sizes)
            free_from.append(end)
            sizes.append(size)
        slots[number] = slot
    return slots


_TENSORS = {"q": 1, "kv": 2, "out": 1, "qdo": 2, "dq": 1, "dkv": 2}
"""Tensors of a head's width, good enough to match buffers and slots by size."""

BufferRow = tuple[int, int]
"""(buffer, first row) of a chunk."""


class Landings:
    """The receive buffers of one rank, numbered after the buffers of its own rows.

    own: name -> the buffer of the rank's own rows. own_rows: chunk -> its first row there. buffers: for messages, with
    their slots. regions: (step, peer, number of a part) -> where that part of a message lands.
    """

    def __init__(self, plan: Plan, rank: int, rows: list[int], messages: RankMessages, joined: frozenset[str]) -> None:
        self.plan, self.rank, self.rows, self.messages, self.joined = plan, rank, rows, messages, joined
        self.own = {name: number for number, (_, name) in enumerate((*plan.phase.reads, *plan.phase.writes))}
        self.own_rows = plan.layout.rows(rank)
        self.regions: dict[tuple[int, int, int], Region] = {}
        self._parts: list[tuple[tuple[str, int], ...]] = []
        self._lives: list[Life] = []
        self._arrivals: dict[tuple[str, int], list[tuple[int, BufferRow]]] = defaultdict(list)
        for step, by_peer in messages.incoming.items():
            self._place(step, by_peer)
        self._note_reads()
        slots = assign_slots(self._parts, self._lives)
        self.buffers = tuple(Buffer(parts, slot) for parts, slot in zip(self._parts, slots, strict=True))

    def read_place(self, name: str, chunk: int, step: int) -> BufferRow:
        """Return where the rank holds an input before a step, or raise a PlanError."""
        if chunk in self.own_rows:
            return self.own[name], self.own_rows[chunk]
        for arrival, place in reversed(self._arrivals[name, chunk]):
            if arrival < step:
                return place
        raise plan_error(self.plan, f"R1, R2: it does not hold {name} of chunk {chunk} yet", step, self.rank)

    def _place(self, step: int, by_peer: dict[int, Parts]) -> None:
        """Add a buffer per received message, and one for each joined name; record the place of each chunk."""
        shared: dict[str, list[tuple[int, int, int, tuple[int, ...]]]] = defaultdict(list)
        results = self.plan.phase.write_names
        for peer, parts in by_peer.items():
            alone: list[tuple[str, int]] = []
            merged = -1  # a result is merged once it has landed, an input is read later
            for at, (name, chunks) in enumerate(parts):
                if name in self.joined:
                    shared[name].append((self.plan.layout.chunks[chunks[0]].lo, peer, at, chunks))
                else:
                    alone.append((name, self._arrive((step, peer, at), 0, name, chunks)))
                    merged = step if name in results else merged
            if alone:
                self._parts.append(tuple(alone))
                self._lives.append(Life(step, merged))
        for name, landing in shared.items():
            end = 0
            for _, peer, at, chunks in sorted(landing):
                end = self._arrive((step, peer, at), end, name, chunks)
            self._parts.append(((name, end),))
            self._lives.append(Life(step))

    def _arrive(self, part: tuple[int, int, int], first: int, name: str, chunks: tuple[int, ...]) -> int:
        """Record that a part of a message, (step, peer, number), lands in the next buffer; return the row behind it."""
        buffer, row = len(self.own) + len(self._parts), first
        for chunk in chunks:
            self._arrivals[name, chunk].append((part[0], (buffer, row)))
            row += self.rows[chunk]
        self.regions[part] = Region(buffer, name, first, row)
        return row

    def _note_reads(self) -> None:
        """Record the last step in which compute, or a message that hands on, reads each buffer."""
        phase, own = self.plan.phase, self.own_rows
        for step, blocks in self.messages.blocks.items():
            for _, _, q, kv in blocks:
                if q not in own:
                    self._life(phase.read_q, q, step).computed = step  # steps increase
                if kv not in own:
                    self._life(phase.read_kv, kv, step).computed = step
        for step, by_peer in self.messages.outgoing.items():
            for parts in by_peer.values():
                for name, chunks in parts:
                    for chunk in chunks if name not in phase.write_names else ():
                        if chunk not in own:
                            self._life(name, chunk, step).moved = step

    def _life(self, name: str, chunk: int, step: int) -> Life:
        """Return the life of the buffer in which an input of another rank is before a step."""
        return self._lives[self.read_place(name, chunk, step)[0] - len(self.own)]

    def waits(self) -> dict[int, int]:
        """Return step -> the last step whose compute reads memory in which something new lands in this step."""
        tenants: dict[int | None, list[Life]] = defaultdict(list)
        for buffer, life in zip(self.buffers, self._lives, strict=True):
            tenants[buffer.slot].append(life)
        after: dict[int, int] = defaultdict(lambda: -1)
        for lives in tenants.values():
            for life in lives:
                earlier = [other.computed for other in lives if other.begin < life.begin]
                after[life.begin] = max([after[life.begin], *earlier])
        return after


def landings_of(plan: Plan, batch: int = 1) -> tuple[Landings, ...]:
    """Return the landings of every rank, or raise a PlanError: a rank reads, or hands on, what it does not hold.

    batch: sequences at once. It decides whether messages share a buffer, see `messages.names_joined`.
    """
    joined, rows = names_joined(plan.mask, batch), [len(chunk) for chunk in plan.layout.chunks]
    return tuple(Landings(plan, rank, rows, its, joined) for rank, its in enumerate(rank_messages(plan, batch)))


ALIGNMENT = 128
"""Every tensor starts at a multiple of this many bytes, which suffices for any kernel's vector loads."""

Starts = dict[str, tuple[int, ...]]
"""name -> the first byte of each of its tensors in the arena."""


class Arenas:
    """The arenas of all ranks: the slots of each lie one after another, and buffers of a slot begin with it.

    Attributes:
        landings: of all ranks.
        row_bytes: by name, of a row of each of its tensors, all sequences of the batch together.
        nbytes: of the largest arena: every rank has one of that size.
    """

    def __init__(self, landings: Sequence[Landings], row_bytes: Mapping[str, tuple[int, ...]]) -> None:
        self.landings, self.row_bytes, self.nbytes = landings, row_bytes, 0
        self._slots: list[dict[int | None, int]] = []
        self._starts: dict[tuple[int, int], Starts] = {}
        for one in landings:
            sizes: dict[int | None, int] = {}
            for buffer in one.buffers:
                size = sum(aligned(rows * row) for name, rows in buffer.parts for row in row_bytes[name])
                sizes[buffer.slot] = max(sizes.get(buffer.slot, 0), size)
            self._slots.append(dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False)))
            self.nbytes = max(self.nbytes, sum(sizes.values()))

    def starts_on(self, rank: int) -> dict[int, Starts]:
        """Return where the tensors of all receive buffers of a rank begin, by buffer."""
        first = len(self.landings[rank].own)
        return {number: self.starts(rank, number) for number in range(first, first + len(self.landings[rank].buffers))}

    def sent_by(self, rank: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return by (step, peer) where in the peer's arena each tensor of a rank's messages goes."""
        outgoing = self.landings[rank].messages.outgoing
        return {(step, peer): self.lands(step, rank, peer) for step, by_peer in outgoing.items() for peer in by_peer}

    def starts(self, rank: int, number: int) -> Starts:
        """Return where the tensors of one of them begin."""
        if (found := self._starts.get((rank, number))) is None:
            buffer = self.landings[rank].buffers[number - len(self.landings[rank].own)]
            at, found = self._slots[rank][buffer.slot], Starts()
            for name, rows in buffer.parts:
                *begin, at = accumulate((aligned(rows * row) for row in self.row_bytes[name]), initial=at)
                found[name] = tuple(begin)
            self._starts[rank, number] = found
        return found

    def lands(self, step: int, source: int, peer: int) -> tuple[int, ...]:
        """Return where each tensor of a message lands in its receiver's arena."""
        theirs = self.landings[peer]
        regions = [theirs.regions[step, source, at] for at in range(len(theirs.messages.incoming[step][source]))]
        starts = {region.buffer: self.starts(peer, region.buffer) for region in regions}
        return tuple(
            start + region.lo * row
            for region in regions
            for start, row in zip(starts[region.buffer][region.name], self.row_bytes[region.name], strict=True)
        )


def aligned(nbytes: int) -> int:
    """Return where a tensor may begin that follows one of so many bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
