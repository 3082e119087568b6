"""Lower a plan to one flat program per rank: fused kernel calls, bounded slots, one message per peer and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NoReturn

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import Plan, chunk_of
from dfa_megatron.plan.language.program import Buffer, Call, Merge, Message, Program, Region, Step, Write
from dfa_megatron.plan.language.validate import validate
from dfa_megatron.plan.lowering.fuse import FusedTile, fuse
from dfa_megatron.plan.lowering.messages import REMEMBERED_RANKS, Parts, RankMessages, Same, joined, rank_messages
from dfa_megatron.plan.lowering.pack import packs, segments_of
from dfa_megatron.plan.lowering.slots import Lifetimes, Stored, assign_slots

Place = tuple[int, int]
"""(buffer, first row) of a chunk."""


def lower_all(plan: Plan, batch: int = 1) -> list[Program]:
    """Validate a plan and lower it for every rank.

    Args:
        plan: one phase.
        batch: sequences at once. It decides whether messages share a buffer, see `messages.joined`.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    lower = _lowered if plan.ranks <= REMEMBERED_RANKS else _lowered.__wrapped__
    return list(lower(Same(plan), batch))


@lru_cache(maxsize=8)  # what "auto" looks at: each plan is simulated, measured, and the chosen one checked
def _lowered(same: Same, batch: int) -> tuple[Program, ...]:
    plan = same.plan
    validate(plan)
    ranks, together = enumerate(rank_messages(plan, batch)), joined(plan.mask, batch)
    return tuple(_Lowering(plan, rank, messages, together).program() for rank, messages in ranks)


class _Lowering:
    """State of one lowering: the place of each chunk at each step, and the lifetime of each buffer."""

    def __init__(self, plan: Plan, rank: int, messages: RankMessages, together: frozenset[str]) -> None:
        self.plan, self.rank, self.messages = plan, rank, messages
        self.layout, self.phase = plan.layout, plan.phase
        self.reads, self.writes = plan.phase.reads, plan.phase.writes
        self.accumulators = frozenset(plan.phase.write_names)
        self.buffers: list[Buffer] = []
        self.lives = Lifetimes()
        self.stored = Stored()
        self.own: dict[str, int] = {}
        self.own_rows = self.layout.offsets(self.layout.of(rank))
        self.arrivals: dict[tuple[str, int], list[tuple[int, Place]]] = defaultdict(list)
        self.departures: dict[tuple[str, int], list[tuple[int, Place]]] = defaultdict(list)
        self.joined = together
        self.landings: dict[tuple[int, int, int], Region] = {}
        self._place_own()
        for step, by_peer in messages.incoming.items():
            self._place_landings(step, by_peer)
        for step, by_peer in messages.outgoing.items():
            self._place_departures(step, by_peer)

    def program(self) -> Program:
        """Lower every step in order, then assign slots to the buffers."""
        bodies = [self._body(step) for step in range(self.plan.steps)]
        slots = assign_slots(self.buffers, self.lives, own=len(self.own))
        tenants: dict[int, list[int]] = defaultdict(list)
        for buffer, slot in slots.items():
            tenants[slot].append(buffer)
        opening: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self.buffers)):
            if self._needs_identity(number):
                opening[self.lives.interval(number)[0]].append(number)
        steps = []
        for number, (sends, receives, calls, merges) in enumerate(bodies):
            landed = {regions[0].buffer for message in receives for regions in message.parts}
            after = self.lives.after(number, [tenants[slots[buffer]] for buffer in landed])
            steps.append(Step(after, sends, receives, tuple(opening[number]), calls, merges))
        buffers = tuple(Buffer(b.parts, slots.get(number), b.accumulates) for number, b in enumerate(self.buffers))
        return Program(self.rank, self.plan.ranks, self.phase, buffers, tuple(steps))

    # Where things lie.

    def _place_own(self) -> None:
        rows = self._rows(self.own_rows)
        for _, name in (*self.reads, *self.writes):
            self.own[name] = self._new_buffer(((name, rows),), accumulates=name in self.accumulators)
            self.lives.begin(self.own[name], 0)

    def _place_landings(self, step: int, by_peer: dict[int, Parts]) -> None:
        """Add a buffer per received message, and one for each joined name; record the place of each chunk."""
        together: dict[str, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
        for peer, parts in by_peer.items():
            alone = [(name, at, chunks) for at, (name, chunks) in enumerate(parts) if name not in self.joined]
            if alone:
                buffer = self._landing(step, tuple((name, self._rows(chunks)) for name, _, chunks in alone))
                for name, at, chunks in alone:
                    self._arrive((step, peer, at), (buffer, 0), name, chunks)
            for at, (name, chunks) in enumerate(parts):
                if name in self.joined:
                    together[name].append((peer, at, chunks))
        for name, landing in together.items():
            buffer, first = self._landing(step, ((name, sum(self._rows(chunks) for *_, chunks in landing)),)), 0
            for peer, at, chunks in sorted(landing, key=lambda part: self.layout.chunks[part[2][0]]):
                self._arrive((step, peer, at), (buffer, first), name, chunks)
                first += self._rows(chunks)

    def _landing(self, step: int, parts: tuple[tuple[str, int], ...]) -> int:
        buffer = self._new_buffer(parts, accumulates=False)
        self.lives.begin(buffer, step)
        self.lives.moved(buffer, step)
        return buffer

    def _arrive(self, part: tuple[int, int, int], place: Place, name: str, chunks: tuple[int, ...]) -> None:
        """Record that a part of a message, (step, peer, number), lands in a buffer from a given row on."""
        buffer, first = place
        self.landings[part] = Region(buffer, name, first, first + self._rows(chunks))
        for chunk, row in self.layout.offsets(chunks).items():
            self.arrivals[name, chunk].append((part[0], (buffer, first + row)))

    def _place_departures(self, step: int, by_peer: dict[int, Parts]) -> None:
        """Add buffers for accumulators that leave together: one per destination, or one for all if joined."""
        for name in self.phase.write_names:
            groups = [chunks for parts in by_peer.values() for what, chunks in parts if what == name]
            if self.joined and groups:
                groups = [tuple(sorted(chain.from_iterable(groups), key=self.layout.chunks.__getitem__))]
            for chunks in groups:
                buffer = self._new_buffer(((name, self._rows(chunks)),), accumulates=True)
                for chunk, row in self.layout.offsets(chunks).items():
                    departures = self.departures[name, chunk]
                    if departures and departures[-1][0] == step:
                        self._fail(f"R3: {name} of chunk {chunk} leaves rank {self.rank} twice", step)
                    departures.append((step, (buffer, row)))

    def _new_buffer(self, parts: tuple[tuple[str, int], ...], accumulates: bool) -> int:
        self.buffers.append(Buffer(parts, None, accumulates))
        return len(self.buffers) - 1

    def _rows(self, chunks: Iterable[int]) -> int:
        return sum(len(self.layout.chunks[chunk]) for chunk in chunks)

    def _read_place(self, name: str, chunk: int, step: int) -> Place:
        if chunk in self.own_rows:
            return self.own[name], self.own_rows[chunk]
        landed = [place for arrival, place in self.arrivals[name, chunk] if arrival < step]
        if not landed:
            self._fail(f"R1, R2: rank {self.rank} does not hold {name} of chunk {chunk} before step {step}", step)
        return landed[-1]

    def _write_place(self, name: str, chunk: int, step: int) -> Place:
        if chunk in self.own_rows:
            return self.own[name], self.own_rows[chunk]
        for departure, place in self.departures[name, chunk]:
            if departure > step:
                return place
        self._fail(f"R4: {name} of chunk {chunk}, written on rank {self.rank}, never goes to its owner", step)

    # What happens in a step.

    def _body(self, step: int) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Call, ...], tuple[Merge, ...]]:
        outgoing, incoming = self.messages.outgoing.get(step, {}), self.messages.incoming.get(step, {})
        sends = tuple(self._send(step, peer, parts) for peer, parts in outgoing.items())
        receives = tuple(
            Message(peer, tuple((self.landings[step, peer, at],) for at in range(len(parts))))
            for peer, parts in incoming.items()
        )
        calls = tuple(self._calls(step))
        merges = tuple(merge for peer, parts in incoming.items() for merge in self._merges(step, peer, parts))
        return sends, receives, calls, merges

    def _send(self, step: int, peer: int, parts: Parts) -> Message:
        sent = []
        for name, chunks in parts:
            regions: list[Region] = []
            for chunk in chunks:
                if name in self.accumulators:
                    buffer, row = next(place for at, place in self.departures[name, chunk] if at == step)
                    self.lives.sent_after_write(buffer, step)
                    rows = Span(row, row + len(self.layout.chunks[chunk]))
                    if not self.stored.touches(buffer, rows):
                        self._fail(f"R3: rank {self.rank} sends {name} of chunk {chunk} that it never wrote", step)
                else:
                    buffer, row = self._read_place(name, chunk, step)
                self.lives.moved(buffer, step)
                end = row + len(self.layout.chunks[chunk])
                if regions and regions[-1].buffer == buffer and regions[-1].hi == row:
                    row = regions.pop().lo
                regions.append(Region(buffer, name, row, end))
            sent.append(tuple(regions))
        return Message(peer, tuple(sent))

    def _calls(self, step: int) -> Iterator[Call]:
        # A write's rows lie at a fixed distance from the rows it is computed from. Blocks that read and write the same
        # buffers at the same distances can share a kernel call.
        groups: dict[tuple[int, int, tuple[Place, ...]], list[FusedTile]] = defaultdict(list)
        for block in self.messages.blocks.get(step, ()):
            q_buffer, q_row = self._read_place(self.phase.read_q, block.q_chunk, step)
            kv_buffer, kv_row = self._read_place(self.phase.read_kv, block.kv_chunk, step)
            targets = []
            for side, name in self.writes:
                buffer, row = self._write_place(name, chunk_of(block, side), step)
                targets.append((buffer, row - (q_row if side == "q" else kv_row)))
            by = q_row - self.layout.chunks[block.q_chunk].lo, kv_row - self.layout.chunks[block.kv_chunk].lo
            for tile in self.plan.tiles(block):
                groups[q_buffer, kv_buffer, tuple(targets)].append((tile.shift(*by), (block,)))
        for (q_buffer, kv_buffer, shifts), tiles in groups.items():
            for group in packs(fuse(tiles)):
                yield self._call(step, q_buffer, kv_buffer, shifts, group)

    def _call(
        self, step: int, q_buffer: int, kv_buffer: int, shifts: tuple[Place, ...], group: Sequence[FusedTile]
    ) -> Call:
        q_rows, kv_rows, segments = segments_of(group)
        q = Region(q_buffer, self.phase.read_q, q_rows.lo, q_rows.hi)
        kv = Region(kv_buffer, self.phase.read_kv, kv_rows.lo, kv_rows.hi)
        for buffer in (q_buffer, kv_buffer):
            self.lives.computed(buffer, step)
        writes = []
        for (side, name), (buffer, by) in zip(self.writes, shifts, strict=True):
            span = q_rows if side == "q" else kv_rows
            writes.append(self._write(step, Region(buffer, name, span.lo + by, span.hi + by)))
        blocks = tuple(sorted({block for _, its in group for block in its}))
        return Call(q, kv, segments, tuple(writes), blocks, sum(tile.area for tile, _ in group))

    def _merges(self, step: int, peer: int, parts: Parts) -> Iterator[Merge]:
        """Merge landed partials into the rank's accumulators; adjacent rows form one merge."""
        for at, (name, chunks) in enumerate(parts):
            if name not in self.accumulators:
                continue
            source = self.landings[step, peer, at].buffer
            self.lives.computed(source, step)
            runs: list[tuple[Region, Region]] = []
            for chunk, row in self.layout.offsets(chunks).items():
                rows = len(self.layout.chunks[chunk])
                to_buffer, to_row = self._write_place(name, chunk, step)
                start, to_start = row, to_row
                if runs and runs[-1][1].buffer == to_buffer and runs[-1][1].hi == to_row:
                    before, to_before = runs.pop()
                    start, to_start = before.lo, to_before.lo
                into = Region(to_buffer, name, to_start, to_row + rows)
                runs.append((Region(source, name, start, row + rows), into))
            for region, into in runs:
                yield Merge(region, self._write(step, into))

    def _write(self, step: int, region: Region) -> Write:
        """Record a write to these rows. It is fresh if none of them held a result before."""
        fresh = self.stored.add(region.buffer, Span(region.lo, region.hi))
        self.lives.begin(region.buffer, step)
        self.lives.written(region.buffer, step)
        return Write(region, fresh)

    def _needs_identity(self, buffer: int) -> bool:
        """Return whether a row of this accumulator is merged into, or read, before it is first stored."""
        if not self.buffers[buffer].accumulates:
            return False
        ((_, rows),) = self.buffers[buffer].parts
        return self.stored.needs_identity(buffer, rows)

    def _fail(self, reason: str, step: int) -> NoReturn:
        raise PlanError(reason, grid(self.plan, mark=(step, self.rank)))
