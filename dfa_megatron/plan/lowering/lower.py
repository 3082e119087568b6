"""Lower a plan to one flat program per rank: fused kernel calls, bounded slots, one message per peer and step.

How partial results are merged is planned row by row: with which stored partials, and into which destination. A kernel's
partials are saved until several can be merged in one pass: with a partial that landed from another rank (its memory is
needed again), when enough are there, or with the last one. The last merge writes the dtype of the result. So rows with
one partial are never copied, few partials are summed without a detour through the accumulator's dtype, and no result is
cast at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from dfa_megatron.plan.language.geometry import Band, Span, Tile, joined_spans
from dfa_megatron.plan.language.grid import plan_error
from dfa_megatron.plan.language.ir import Block, Plan, chunk_of
from dfa_megatron.plan.language.program import (
    Buffer,
    BufferMerges,
    Call,
    Destination,
    Merge,
    Message,
    Program,
    Region,
    RowsMerge,
    Step,
    WriteMerge,
)
from dfa_megatron.plan.lowering.kernel_calls import FusedTile, Launching, Planned, in_packs
from dfa_megatron.plan.lowering.landings import BufferRow, Landings, Life, assign_slots, landings_of
from dfa_megatron.plan.lowering.messages import Parts

if TYPE_CHECKING:
    from dfa_megatron.plan.lowering.ordered import OrderedWrites


def lower_all(plan: Plan, batch: int = 1) -> list[Program]:
    """Lower a plan for every rank; batch and errors as for `landings_of`."""
    return [lower(landings) for landings in landings_of(plan, batch)]


def lower(landings: Landings, launching: Launching = in_packs) -> Program:
    """Lower a plan for one rank.

    Args:
        landings: of the plan and the rank.
        launching: decides the calls of a kernel, and their launches.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    return _Lowering(landings, launching).program()


class _Buffers(NamedTuple):
    """What tiles read and write. targets: the buffer of each result, and the distance of its rows from those read."""

    q: int
    kv: int
    targets: tuple[BufferRow, ...]


class _Lowering:
    """State of one lowering: the buffers of the rank's results, and their lives."""

    def __init__(self, landings: Landings, launching: Launching) -> None:
        plan, self.landings, self.launching = landings.plan, landings, launching
        self.noted: AccumulatorWrites | OrderedWrites = AccumulatorWrites()
        if plan.order is not None:
            from dfa_megatron.plan.lowering.ordered import OrderedWrites  # which other plans need not load

            self.noted = OrderedWrites(plan, landings.rank, plan.order)
        self.plan, self.rank, self.messages, self.rows = plan, landings.rank, landings.messages, landings.rows
        self.layout, self.phase = plan.layout, plan.phase
        self.writes = plan.phase.writes
        self.accumulators = frozenset(plan.phase.write_names)
        self.own, self.own_rows = landings.own, landings.own_rows
        self.after = landings.waits()
        self.leaving: list[tuple[tuple[str, int], ...]] = []
        self.lives: list[Life] = []
        self.departures: dict[tuple[str, int], list[tuple[int, BufferRow]]] = defaultdict(list)
        self.first = len(self.own) + len(landings.buffers)
        for step, by_peer in self.messages.outgoing.items():
            self._place_departures(step, by_peer)

    def program(self) -> Program:
        """Lower every step in order, then assign slots to the buffers and plan their merges."""
        steps = tuple(self._step(step) for step in range(self.plan.steps))
        taken = 1 + max((b.slot for b in self.landings.buffers if b.slot is not None), default=-1)
        slots = assign_slots(self.leaving, self.lives)
        held = {name: self.layout.tokens(self.rank, side) for side, name in (*self.phase.reads, *self.phase.writes)}
        rows = {self.own[name]: held[name] for name in self.accumulators}
        rows |= {buffer: parts[0][1] for buffer, parts in enumerate(self.leaving, self.first)}
        merges = self.noted.merges(rows)
        own = (Buffer(((name, held[name]),), None, merges.get(buffer)) for name, buffer in self.own.items())
        leaving = (
            Buffer(parts, taken + slot, merges[buffer])
            for buffer, (parts, slot) in enumerate(zip(self.leaving, slots, strict=True), self.first)
        )
        return Program(self.rank, self.plan.ranks, self.phase, (*own, *self.landings.buffers, *leaving), steps)

    # Where results lie.

    def _place_departures(self, step: int, by_peer: dict[int, Parts]) -> None:
        """Add buffers for accumulators that leave together: one per destination, or one for all if joined."""
        for name in self.phase.write_names:
            groups = [chunks for parts in by_peer.values() for what, chunks in parts if what == name]
            if self.landings.joined and groups:
                groups = [tuple(sorted(chain.from_iterable(groups), key=self.layout.chunks.__getitem__))]
            for chunks in groups:
                buffer, row = self.first + len(self.leaving), 0
                self.leaving.append(((name, sum(map(self.rows.__getitem__, chunks))),))
                self.lives.append(Life(step))
                for chunk in chunks:
                    departures = self.departures[name, chunk]
                    if departures and departures[-1][0] == step:
                        raise plan_error(self.plan, f"R3: {name} of chunk {chunk} leaves twice", step, self.rank)
                    departures.append((step, (buffer, row)))
                    row += self.rows[chunk]

    def _write_place(self, name: str, chunk: int, step: int) -> BufferRow:
        if chunk in self.own_rows:
            return self.own[name], self.own_rows[chunk]
        for departure, place in self.departures[name, chunk]:
            if departure > step:
                return place
        why = f"R4: {name} of chunk {chunk}, written here, never goes to its owner"
        raise plan_error(self.plan, why, step, self.rank)

    # What happens in a step.

    def _step(self, step: int) -> Step:
        outgoing, incoming = self.messages.outgoing.get(step, {}), self.messages.incoming.get(step, {})
        sends = tuple(self._send(step, peer, parts) for peer, parts in outgoing.items())
        receives = tuple(
            Message(peer, tuple((self.landings.regions[step, peer, at],) for at in range(len(parts))))
            for peer, parts in incoming.items()
        )
        regions = (region for message in sends for regions in message.parts for region in regions)
        written = [self.lives[r.buffer - self.first].computed for r in regions if r.name in self.accumulators]
        after = max([self.after[step], *written])
        calls = tuple(self._calls(step))
        merges = tuple(merge for peer, parts in incoming.items() for merge in self._merges(step, peer, parts))
        return Step(after, sends, receives, calls, merges)

    def _send(self, step: int, peer: int, parts: Parts) -> Message:
        sent = []
        for name, chunks in parts:
            regions: list[Region] = []
            for chunk in chunks:
                if name in self.accumulators:
                    buffer, row = next(place for at, place in self.departures[name, chunk] if at == step)
                    self.lives[buffer - self.first].moved = step
                else:
                    buffer, row = self.landings.read_place(name, chunk, step)
                end = row + self.rows[chunk]
                if regions and regions[-1].buffer == buffer and regions[-1].hi == row:
                    row = regions.pop().lo
                regions.append(Region(buffer, name, row, end))
            sent.append(tuple(regions))
        return Message(peer, tuple(sent))

    def _calls(self, step: int) -> Iterator[Call]:
        # A write's rows lie at a fixed distance from the rows it is computed from. Blocks that read and write the same
        # buffers at the same distances can share a kernel call.
        groups: dict[tuple[_Buffers, Band | None], list[FusedTile]] = defaultdict(list)
        for block in self.messages.blocks.get(step, ()):
            q_buffer, q_row = self.landings.read_place(self.phase.read_q, block.q_chunk, step)
            kv_buffer, kv_row = self.landings.read_place(self.phase.read_kv, block.kv_chunk, step)
            written = []
            for side, name in self.writes:
                buffer, row = self._write_place(name, chunk_of(block, side), step)
                written.append((buffer, row - (q_row if side == "q" else kv_row)))
            by = q_row - self.layout.chunks[block.q_chunk].lo, kv_row - self.layout.chunks[block.kv_chunk].lo
            buffers = _Buffers(q_buffer, kv_buffer, tuple(written))
            for number, tile in enumerate(self.plan.tiles(block)):
                placed = tile.shift(*by)
                self.noted.placed(q_buffer, kv_buffer, placed, block, number)
                # Leaves by window: in company each has the kernel that it has alone.
                groups[buffers, tile.band if self.noted.apart else None].append((placed, (block,)))
        for (buffers, _), tiles in groups.items():
            for planned in self.launching(tuple(tiles), self.noted.apart):
                call = self._call(step, buffers, planned)
                self.noted.computed(call, planned.tiles)
                yield call

    def _call(self, step: int, buffers: _Buffers, planned: Planned) -> Call:
        q = Region(buffers.q, self.phase.read_q, planned.q.lo, planned.q.hi)
        kv = Region(buffers.kv, self.phase.read_kv, planned.kv.lo, planned.kv.hi)
        writes = []
        for (side, name), (buffer, by) in zip(self.writes, buffers.targets, strict=True):
            rows = q if side == "q" else kv
            writes.append(self._write(step, Region(buffer, name, rows.lo + by, rows.hi + by)))
        area = sum(tile.area for tile in planned.tiles)
        return Call(q, kv, planned.launches, tuple(writes), planned.blocks, area)

    def _merges(self, step: int, peer: int, parts: Parts) -> Iterator[Merge]:
        """Merge landed partials into the rank's accumulators; adjacent rows form one merge."""
        for at, (name, chunks) in enumerate(parts):
            if name not in self.accumulators:
                continue
            source = self.landings.regions[step, peer, at].buffer
            runs: list[tuple[Region, Region, int]] = []  # of a run its last chunk
            for chunk, row in self.layout.offsets(chunks).items():
                rows = self.rows[chunk]
                to_buffer, to_row = self._write_place(name, chunk, step)
                start, to_start = row, to_row
                if runs and runs[-1][1].buffer == to_buffer and runs[-1][1].hi == to_row and not self.noted.apart:
                    before, to_before, _ = runs.pop()
                    start, to_start = before.lo, to_before.lo
                into = Region(to_buffer, name, to_start, to_row + rows)
                runs.append((Region(source, name, start, row + rows), into, chunk))
            for region, into, chunk in runs:
                self.noted.landed(step, peer, chunk, into)
                yield Merge(region, self._write(step, into))

    def _write(self, step: int, region: Region) -> Region:
        """Record that these rows are written in a step."""
        if region.buffer >= self.first:
            life = self.lives[region.buffer - self.first]
            life.begin, life.computed = min(life.begin, step), step
        return region


# How partial results are merged.

MOST_PARTS = 4
"""Partials that the kernels merge in one pass."""

Writes = Sequence[tuple[Region, bool]]
"""Rows of an accumulator in the order of their writes, and whether the partial may be saved.

A kernel's own output may. A landed message may not: its memory is needed again.
"""


class AccumulatorWrites:
    """The writes of one rank's accumulators, in their order, and the merges that follow: in any order of the reduce."""

    apart = False
    """Whether tiles, and chunks that land, stay by themselves."""

    def __init__(self) -> None:
        self._writes: dict[int, list[tuple[Region, bool]]] = defaultdict(list)

    def placed(self, q_buffer: int, kv_buffer: int, tile: Tile, block: Block, number: int) -> None:
        """Note nothing: it does not matter what a partial is of."""

    def computed(self, call: Call, tiles: Sequence[Tile]) -> None:
        """Note what a call writes."""
        for region in call.writes:
            self._writes[region.buffer].append((region, True))

    def landed(self, step: int, peer: int, chunk: int, into: Region) -> None:
        """Note what a message brings."""
        self._writes[into.buffer].append((into, False))

    def merges(self, rows: Mapping[int, int]) -> dict[int, BufferMerges]:
        """Plan the merges of every accumulator, given as buffer -> its rows."""
        return {buffer: merges_of(count, self._writes[buffer]) for buffer, count in rows.items()}


def merges_of(rows: int, writes: Writes) -> BufferMerges:
    """Plan one accumulator of so many rows."""
    ends = [(region.lo, region.hi) for region, _ in writes]
    edges = sorted({0, rows, *(edge for both in ends for edge in both)})
    merges: dict[int, list[RowsMerge]] = defaultdict(list)
    empty: list[Span] = []
    for lo, hi in pairwise(edges):
        order = [at for at, (first, end) in enumerate(ends) if first <= lo < end]
        if not order:
            empty.append(Span(lo, hi))
        for at, saved, has_sum, into in _rows(order, writes):
            before = merges[at][-1] if merges[at] else None
            if before and (before.hi, before.saved, before.sum, before.into) == (lo, saved, has_sum, into):
                merges[at][-1] = RowsMerge(before.lo, hi, before.skip, saved, has_sum, into)
            else:
                merges[at].append(RowsMerge(lo, hi, lo - ends[at][0], saved, has_sum, into))
    summed = [one for of_write in merges.values() for one in of_write if one.into is Destination.SUM]
    for of_write in merges.values():
        # Results first: they free saved partials before a sum is allocated.
        of_write.sort(key=lambda one: one.into is not Destination.RESULT)
    free_after_last_use(merges)
    sum_rows = Span(min((one.lo for one in summed), default=0), max((one.hi for one in summed), default=0))
    mergings = (
        WriteMerge(tuple(merges[at]), may_become_result=may_save and ends[at] == (0, rows))
        for at, (_, may_save) in enumerate(writes)
    )
    return BufferMerges(tuple(mergings), tuple(joined_spans(empty)), sum_rows)


def _rows(order: Sequence[int], writes: Writes) -> Iterable[tuple[int, tuple[int, ...], bool, Destination]]:
    """Yield (write, saved writes merged with it, whether the sum is too, destination) for rows with these writes."""
    saved: tuple[int, ...] = ()
    has_sum = False
    for nth, at in enumerate(order):
        last = nth == len(order) - 1
        room = 1 if has_sum else MOST_PARTS - 1  # beside a sum a second one costs more memory than the pass it saves
        if writes[at][1] and not last and len(saved) < room:
            yield at, (), False, Destination.SAVED
            saved = (*saved, at)
        else:
            yield at, saved, has_sum, Destination.RESULT if last else Destination.SUM
            saved, has_sum = (), True


def free_after_last_use(merges: dict[int, list[RowsMerge]]) -> None:
    """Note where each saved partial is merged for the last time."""
    last: dict[int, tuple[int, int]] = {}
    for at in sorted(merges):
        for index, rows_merge in enumerate(merges[at]):
            for number in rows_merge.saved:
                last[number] = at, index
    for number, (at, index) in last.items():
        merges[at][index] = replace(merges[at][index], freed=(*merges[at][index].freed, number))
