"""Lower a plan to one flat program per rank: fused kernel calls, bounded slots, one message per peer and step.

How partial results merge is planned row by row: with which stored partials, and into which destination. As they come, a
kernel's partials are saved until several can be merged in one pass: with a partial that landed from another rank (its
memory is needed again), when enough are there, or with the last one. The last merge writes the dtype of the result. So
rows with one partial are never copied, few partials are summed without a detour through the accumulator's dtype, and no
result is cast at the end. In the fixed order of a tree a partial waits for its sibling, see `plan.language.leaves`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Band, Span, Tile, joined_spans
from dfa_megatron.plan.language.grid import plan_error
from dfa_megatron.plan.language.ir import Plan, chunk_of
from dfa_megatron.plan.language.leaves import Keys, halves
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
from dfa_megatron.plan.lowering.kernel_calls import ANY, Planned, Takes, launches
from dfa_megatron.plan.lowering.landings import BufferRow, Landings, Life, assign_slots, landings_of
from dfa_megatron.plan.lowering.messages import Parts

if TYPE_CHECKING:
    from dfa_megatron.plan.lowering.leaf_rows import Leaves


def lower_all(plan: Plan, batch: int = 1) -> list[Program]:
    """Lower a plan for every rank; batch and errors as for `landings_of`."""
    return [lower(landings) for landings in landings_of(plan, batch)]


def lower(landings: Landings, takes: Takes = ANY) -> Program:
    """Lower a plan for the rank of these landings, or raise a PlanError.

    takes: what one launch of the kernel computes, which decides calls and launches.
    """
    return _Lowering(landings, takes).program()


class _Buffers(NamedTuple):
    """What tiles read and write. targets: the buffer of each result, and the distance of its rows from those read."""

    q: int
    kv: int
    targets: tuple[BufferRow, ...]


class _Lowering:
    """State of one lowering: the buffers of the rank's results, and their lives."""

    def __init__(self, landings: Landings, takes: Takes) -> None:
        plan, self.landings, self.takes = landings.plan, landings, takes
        self.written: dict[int, list[Write]] = defaultdict(list)
        self.leaves: Leaves | None = None
        if plan.order is not None:
            from dfa_megatron.plan.lowering.leaf_rows import Leaves  # which other plans need not load

            self.leaves = Leaves(plan, landings.rank, plan.order)
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
        ordered = self.leaves is not None
        merges = {buffer: merges_of(count, self.written[buffer], ordered=ordered) for buffer, count in rows.items()}
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
        groups: dict[tuple[_Buffers, Band | None], list[Tile]] = defaultdict(list)
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
                if self.leaves is not None:
                    self.leaves.place(q_buffer, kv_buffer, placed, block, number)
                # Leaves by window: in company each has the kernel that it has alone.
                groups[buffers, None if self.leaves is None else tile.band].append(placed)
        for (buffers, _), tiles in groups.items():
            for planned in launches(self.takes, tuple(tiles), self.leaves is not None):
                call = self._call(step, buffers, planned)
                leaves = [()] * len(call.writes) if self.leaves is None else self.leaves.of_call(call, planned.tiles)
                for region, brought in zip(call.writes, leaves, strict=True):
                    self.written[region.buffer].append(Write(region, True, brought))
                yield call

    def _call(self, step: int, buffers: _Buffers, planned: Planned) -> Call:
        q = Region(buffers.q, self.phase.read_q, planned.q.lo, planned.q.hi)
        kv = Region(buffers.kv, self.phase.read_kv, planned.kv.lo, planned.kv.hi)
        writes = []
        for (side, name), (buffer, by) in zip(self.writes, buffers.targets, strict=True):
            rows = q if side == "q" else kv
            writes.append(self._write(step, Region(buffer, name, rows.lo + by, rows.hi + by)))
        return Call(q, kv, planned.launches, tuple(writes))

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
                if runs and runs[-1][1].buffer == to_buffer and runs[-1][1].hi == to_row and self.leaves is None:
                    before, to_before, _ = runs.pop()
                    start, to_start = before.lo, to_before.lo
                into = Region(to_buffer, name, to_start, to_row + rows)
                runs.append((Region(source, name, start, row + rows), into, chunk))
            for region, into, chunk in runs:
                leaves = () if self.leaves is None else self.leaves.of_message(step, peer, chunk, into)
                self.written[into.buffer].append(Write(into, False, leaves))
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


class LeafRows(NamedTuple):
    """Rows of a buffer for which a write brings a leaf of a tree."""

    lo: int
    hi: int
    key: int


class Write(NamedTuple):
    """A write of an accumulator.

    may_save: it is a kernel's own output, which may wait as it is; the memory of a landed message is needed again.
    leaves: what it brings where the order is fixed.
    """

    region: Region
    may_save: bool
    leaves: Sequence[LeafRows] = ()


Way = tuple[int, tuple[int, ...], bool, Destination, tuple[bool, ...]]
"""How some rows of a write merge: its number, then `saved`, `sum`, `into` and `first` of `RowsMerge`."""


def merges_of(rows: int, writes: Sequence[Write], *, ordered: bool = False) -> BufferMerges:
    """Plan one accumulator of so many rows, whose writes come in this order."""
    merges: dict[int, list[RowsMerge]] = defaultdict(list)
    empty: list[Span] = []
    for lo, hi, brought in _runs(rows, writes, ordered=ordered):
        if not brought:
            empty.append(Span(lo, hi))
            continue
        for number, saved, has_sum, into, first in _in_tree(brought) if ordered else _as_they_come([*brought], writes):
            before, how = merges[number][-1] if merges[number] else None, (lo, saved, has_sum, into, first)
            if before and (before.hi, before.saved, before.sum, before.into, before.first) == how:
                merges[number][-1] = replace(before, hi=hi)
            else:
                skip = lo - writes[number].region.lo
                merges[number].append(RowsMerge(lo, hi, skip, saved, has_sum, into, first=first))
    summed = [one for of_write in merges.values() for one in of_write if one.into is Destination.SUM]
    for of_write in merges.values():
        # Results first: they free saved partials before a sum is allocated.
        of_write.sort(key=lambda one: one.into is not Destination.RESULT)
    _free_after_last_use(merges)
    sum_rows = Span(min((one.lo for one in summed), default=0), max((one.hi for one in summed), default=0))
    whole = Span(0, rows)
    mergings = (
        WriteMerge(
            tuple(merges[number]),
            may_save and Span(region.lo, region.hi) == whole and not (ordered and len(writes) > 1),
            may_save,
        )
        for number, (region, may_save, _) in enumerate(writes)
    )
    return BufferMerges(tuple(mergings), tuple(joined_spans(empty)), sum_rows, ordered)


def _runs(rows: int, writes: Sequence[Write], *, ordered: bool) -> Iterator[tuple[int, int, dict[int, list[int]]]]:
    """Yield runs of rows, and for each the writes that reach it with the keys of their leaves there."""
    pieces = [write.leaves if ordered else [LeafRows(write.region.lo, write.region.hi, 0)] for write in writes]
    edges = sorted({0, rows, *(edge for of_write in pieces for piece in of_write for edge in piece[:2])})
    brought: list[dict[int, list[int]]] = [defaultdict(list) for _ in edges[1:]]
    for number, of_write in enumerate(pieces):
        for lo, hi, key in of_write:
            for run in range(bisect_left(edges, lo), bisect_left(edges, hi)):
                brought[run][number].append(key)
    for (lo, hi), keys in zip(pairwise(edges), brought, strict=True):
        yield lo, hi, keys


def _as_they_come(order: Sequence[int], writes: Sequence[Write]) -> Iterator[Way]:
    """Yield how rows merge that these writes reach."""
    saved: tuple[int, ...] = ()
    has_sum = False
    for nth, number in enumerate(order):
        last = nth == len(order) - 1
        room = 1 if has_sum else MOST_PARTS - 1  # beside a sum a second one costs more memory than the pass it saves
        if writes[number].may_save and not last and len(saved) < room:
            yield number, (), False, Destination.SAVED, ()
            saved = (*saved, number)
        else:
            yield number, saved, has_sum, Destination.RESULT if last else Destination.SUM, ()
            saved, has_sum = (), True


def _in_tree(brought: Mapping[int, Sequence[int]]) -> Iterator[Way]:
    """Yield how rows merge for which writes bring these leaves: node by node."""
    units = {tuple(sorted(keys)): number for number, keys in brought.items()}
    root = tuple(sorted(key for keys in units for key in keys))
    above: dict[Keys, tuple[Keys, Keys, bool]] = {}  # node -> its sibling, the node of both, is the sibling first?
    below = [root]
    while below:
        if (node := below.pop()) not in units:
            if len(node) == 1:
                raise PlanError("a partial of a fixed order is no node of the tree")
            one, other = halves(node)
            above |= {one: (other, node, False), other: (one, node, True)}
            below += one, other
    waiting: dict[Keys, int] = {}
    for node, number in sorted(units.items(), key=lambda unit: unit[1]):
        saved, first = list[int](), list[bool]()
        while node != root and above[node][0] in waiting:
            sibling, node, goes_first = above[node]
            saved.append(waiting.pop(sibling))
            first.append(goes_first)
        waiting[node] = number
        yield number, tuple(saved), False, Destination.RESULT if node == root else Destination.SAVED, tuple(first)


def _free_after_last_use(merges: dict[int, list[RowsMerge]]) -> None:
    """Note where each saved partial is merged for the last time."""
    last: dict[int, tuple[int, int]] = {}
    for at in sorted(merges):
        for index, rows_merge in enumerate(merges[at]):
            for number in rows_merge.saved:
                last[number] = at, index
    for number, (at, index) in last.items():
        merges[at][index] = replace(merges[at][index], freed=(*merges[at][index].freed, number))
