"""Lowering: a plan becomes one flat program per rank, with fused kernel calls, bounded slots and one message per peer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Callable, Iterable, NoReturn

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.fuse import Piece, fuse
from dfa_megatron.plan.geometry import Span, Tile
from dfa_megatron.plan.grid import grid
from dfa_megatron.plan.ir import Block, Plan, Transfer, chunk_of
from dfa_megatron.plan.program import Buffer, Call, Fold, Message, Program, Region, Step, Write
from dfa_megatron.plan.slots import Lifetimes, assign_slots
from dfa_megatron.plan.validate import validate

Place = tuple[int, int]
"""(buffer, first row) of a chunk."""


def lower(plan: Plan, rank: int) -> Program:
    """The program of one rank of a plan that `validate` accepts.

    Raises:
        PlanError: the plan breaks a rule of the language that shows on this rank (R1 to R5).
    """
    return _Lowering(plan, rank).program()


class _Lowering:
    """The working state of one lowering: where each chunk lies at which step, and how long each buffer lives."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.layout, self.phase = plan, rank, plan.layout, plan.phase
        self.writes = plan.phase.write_names
        self.buffers: list[Buffer] = []
        self.lives = Lifetimes()
        self.covered: dict[int, list[Span]] = defaultdict(list)
        self.home: dict[str, Place] = {}
        self.arrivals: dict[tuple[str, int], list[tuple[int, Place]]] = defaultdict(list)
        self.departures: dict[tuple[str, int], list[tuple[int, Place]]] = defaultdict(list)
        self.incoming = _by_step_and_peer(plan, lambda t: t.dst == rank, lambda t: t.src)
        self.outgoing = _by_step_and_peer(plan, lambda t: t.src == rank, lambda t: t.dst)
        self.blocks: dict[int, list[Block]] = defaultdict(list)
        for block in sorted(plan.blocks):
            if block.rank == rank:
                self.blocks[block.step].append(block)
        self._place_home()
        self.landings = {step: self._place_landings(step, by) for step, by in sorted(self.incoming.items())}
        self._place_departures()

    def program(self) -> Program:
        """Lower every step in order, then give the buffers memory."""
        bodies = [self._body(step) for step in range(self.plan.steps)]
        slots = assign_slots(self.buffers, self.lives, home=len(self.home))
        steps = []
        for number, (sends, receives, calls, folds) in enumerate(bodies):
            opens = tuple(b for b in self.lives.opened_at(number) if self._needs_identity(b))
            after = self.lives.after(number, [m.parts[0][0].buffer for m in receives], slots)
            steps.append(Step(after, sends, receives, opens, calls, folds))
        buffers = tuple(replace(b, slot=slots.get(number)) for number, b in enumerate(self.buffers))
        return Program(self.rank, self.plan.ranks, self.phase, buffers, tuple(steps))

    # Where things lie.

    def _place_home(self) -> None:
        rows = sum(len(self.layout.chunks[chunk]) for chunk in self.layout.of(self.rank))
        for name in [name for _, name in self.phase.reads] + list(self.writes):
            self.home[name] = (self._new_buffer(((name, rows),), accumulates=name in self.writes), 0)
            self.lives.begin(self.home[name][0], 0)

    def _place_landings(self, step: int, by_peer: dict[int, list[Transfer]]) -> dict[int, int]:
        """One buffer per received message; remembers where each landed chunk lies and from when."""
        buffers = {}
        for peer, transfers in sorted(by_peer.items()):
            names = _chunks_by_name(transfers)
            parts = tuple((name, self._rows(chunks)) for name, chunks in names.items())
            buffers[peer] = self._new_buffer(parts, accumulates=False)
            self.lives.begin(buffers[peer], step)
            self.lives.moved(buffers[peer], step)
            for name, chunks in names.items():
                for chunk, row in self.layout.offsets(chunks).items():
                    self.arrivals[name, chunk].append((step, (buffers[peer], row)))
        return buffers

    def _place_departures(self) -> None:
        """Accumulators that leave together share a buffer."""
        for step, by_peer in sorted(self.outgoing.items()):
            for transfers in by_peer.values():
                for name, chunks in _chunks_by_name(transfers).items():
                    if name not in self.writes:
                        continue
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

    def _home_place(self, name: str, chunk: int) -> Place:
        row = self.layout.offsets(self.layout.of(self.rank))[chunk]
        return self.home[name][0], row

    def _read_place(self, name: str, chunk: int, step: int) -> Place:
        if self.layout.home[chunk] == self.rank:
            return self._home_place(name, chunk)
        landed = [place for arrival, place in self.arrivals[name, chunk] if arrival < step]
        if not landed:
            self._fail(f"R1, R2: rank {self.rank} does not hold {name} of chunk {chunk} before step {step}", step)
        return landed[-1]

    def _write_place(self, name: str, chunk: int, step: int) -> Place:
        if self.layout.home[chunk] == self.rank:
            return self._home_place(name, chunk)
        leaving = [place for departure, place in self.departures[name, chunk] if departure > step]
        if not leaving:
            self._fail(f"R4: {name} of chunk {chunk}, written on rank {self.rank}, never goes home", step)
        return leaving[0]

    # What happens in a step.

    def _body(
        self, step: int
    ) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Call, ...], tuple[Fold, ...]]:
        sends = tuple(self._send(step, peer, by) for peer, by in sorted(self.outgoing.get(step, {}).items()))
        receives = tuple(self._receive(peer, buffer) for peer, buffer in sorted(self.landings.get(step, {}).items()))
        calls = tuple(self._calls(step))
        folds = tuple(
            self._fold(step, transfer)
            for peer in sorted(self.incoming.get(step, {}))
            for transfer in self.incoming[step][peer]
            if transfer.what in self.writes
        )
        return sends, receives, calls, folds

    def _send(self, step: int, peer: int, transfers: list[Transfer]) -> Message:
        parts = []
        for name, chunks in _chunks_by_name(transfers).items():
            regions: list[Region] = []
            for chunk in chunks:
                if name in self.writes:
                    buffer, row = next(place for at, place in self.departures[name, chunk] if at == step)
                    self.lives.sent_after_write(buffer, step)
                    rows = Span(row, row + len(self.layout.chunks[chunk]))
                    if not any(len(written & rows) for written in self.covered[buffer]):
                        self._fail(f"R3: rank {self.rank} sends {name} of chunk {chunk} that it never wrote", step)
                else:
                    buffer, row = self._read_place(name, chunk, step)
                self.lives.moved(buffer, step)
                regions = _append(regions, Region(buffer, name, row, row + len(self.layout.chunks[chunk])))
            parts.append(tuple(regions))
        return Message(peer, tuple(parts))

    def _receive(self, peer: int, buffer: int) -> Message:
        return Message(peer, tuple((Region(buffer, name, 0, rows),) for name, rows in self.buffers[buffer].parts))

    def _calls(self, step: int) -> Iterable[Call]:
        groups: dict[tuple[Place, ...], list[Piece]] = defaultdict(list)
        for block in self.blocks[step]:
            places = [self._read_place(name, chunk_of(block, side), step) for side, name in self.phase.reads]
            targets = [self._write_place(name, chunk_of(block, side), step) for side, name in self.phase.writes]
            (_, q_row), (_, kv_row) = places
            q_chunk, kv_chunk = (self.layout.chunks[chunk] for chunk in (block.q_chunk, block.kv_chunk))
            # A write's rows run parallel to the rows it is computed from, at a fixed distance.
            rows = {"q": q_row, "kv": kv_row}
            shifts = [(buffer, row - rows[side]) for (side, _), (buffer, row) in zip(self.phase.writes, targets)]
            key = ((places[0][0], 0), (places[1][0], 0), *shifts)
            for tile in self.plan.tiles(block):
                groups[key].append((tile.shift(q_row - q_chunk.lo, kv_row - kv_chunk.lo), (block,)))
        for ((q_buffer, _), (kv_buffer, _), *shifts), pieces in groups.items():
            for tile, blocks in fuse(pieces):
                yield self._call(step, q_buffer, kv_buffer, shifts, tile, blocks)

    def _call(
        self, step: int, q_buffer: int, kv_buffer: int, shifts: list[Place], tile: Tile, blocks: tuple[Block, ...]
    ) -> Call:
        spans = {"q": tile.q, "kv": tile.kv}
        q = Region(q_buffer, self.phase.read_q, tile.q.lo, tile.q.hi)
        kv = Region(kv_buffer, self.phase.read_kv, tile.kv.lo, tile.kv.hi)
        for buffer in (q_buffer, kv_buffer):
            self.lives.computed(buffer, step)
        writes = tuple(
            self._write(step, Region(buffer, name, spans[side].lo + by, spans[side].hi + by))
            for (side, name), (buffer, by) in zip(self.phase.writes, shifts)
        )
        return Call(q, kv, tile.band, writes, blocks, tile.area)

    def _fold(self, step: int, transfer: Transfer) -> Fold:
        rows = len(self.layout.chunks[transfer.chunk])
        arrivals = self.arrivals[transfer.what, transfer.chunk]
        buffer, row = next(
            place for at, place in arrivals if at == step and place[0] == self.landings[step][transfer.src]
        )
        self.lives.computed(buffer, step)
        to_buffer, to_row = self._write_place(transfer.what, transfer.chunk, step)
        source = Region(buffer, transfer.what, row, row + rows)
        return Fold(source, self._write(step, Region(to_buffer, transfer.what, to_row, to_row + rows)))

    def _write(self, step: int, region: Region) -> Write:
        """Note that these rows hold something from now on, and whether they did before."""
        covered, span = self.covered[region.buffer], Span(region.lo, region.hi)
        fresh = all(not len(old & span) for old in covered)
        covered.append(span)
        self.lives.begin(region.buffer, step)
        self.lives.written(region.buffer, step)
        return Write(region, fresh)

    def _needs_identity(self, buffer: int) -> bool:
        """An accumulator of which some row is folded into, or read, before it was ever stored."""
        if not self.buffers[buffer].accumulates:
            return False
        first: list[Span] = []
        for span in self.covered[buffer]:
            inside = [old for old in first if len(old & span)]
            if not inside:
                first.append(span)
            elif not _holds(first, span):
                return True
        ((_, rows),) = self.buffers[buffer].parts
        return not _holds(first, Span(0, rows))

    def _fail(self, reason: str, step: int) -> NoReturn:
        raise PlanError(reason, grid(self.plan, mark=(step, self.rank)))


def _by_step_and_peer(
    plan: Plan, mine: Callable[[Transfer], bool], peer: Callable[[Transfer], int]
) -> dict[int, dict[int, list[Transfer]]]:
    """Sorted transfers by step and by the rank on the other side."""
    out: dict[int, dict[int, list[Transfer]]] = {}
    for transfer in sorted(plan.transfers):
        if mine(transfer):
            out.setdefault(transfer.step, {}).setdefault(peer(transfer), []).append(transfer)
    return out


def _chunks_by_name(transfers: list[Transfer]) -> dict[str, tuple[int, ...]]:
    names: dict[str, list[int]] = {}
    for transfer in transfers:
        names.setdefault(transfer.what, []).append(transfer.chunk)
    return {name: tuple(sorted(chunks)) for name, chunks in sorted(names.items())}


def _append(regions: list[Region], region: Region) -> list[Region]:
    """Add a region, joined to the last one where it continues it."""
    if regions and regions[-1].buffer == region.buffer and regions[-1].hi == region.lo:
        return [*regions[:-1], replace(regions[-1], hi=region.hi)]
    return [*regions, region]


def _holds(spans: list[Span], whole: Span) -> bool:
    """The spans together cover `whole`."""
    reached = whole.lo
    for span in sorted(spans):
        if span.lo > reached:
            return False
        reached = max(reached, span.hi)
    return reached >= whole.hi


def lower_all(plan: Plan) -> list[Program]:
    """Validate a plan and lower it for every rank.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    validate(plan)
    return [lower(plan, rank) for rank in range(plan.ranks)]
