"""The checker: the loop over sets of tiles. A plan is accepted if and only if running it gives the right numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.grid import grid
from dfa_megatron.plan.interpret import run_together
from dfa_megatron.plan.ir import Plan
from dfa_megatron.plan.lower import lower_all
from dfa_megatron.plan.program import Call, Fold, Message, Program, Region, Write

Piece = tuple[Span, int]
"""Rows of a buffer, and the token position of the first of them."""


@dataclass(slots=True)
class _Content:
    """What a name's rows in a buffer hold: which tokens they are, which are valid, and which pairs were folded in."""

    tokens: list[Piece] = field(default_factory=list)
    valid: list[Span] = field(default_factory=list)
    tiles: list[tuple[Span, Tile]] = field(default_factory=list)


class _Sets:
    """An algebra whose values are sets of token pairs; it also watches that nobody touches memory in flight."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        self.content: dict[tuple[int, str], _Content] = defaultdict(_Content)
        self.tenant: dict[int, int] = {}
        self.locked: set[int] = set()
        self.flying: set[int] = set()
        self.touched: dict[int, int] = {}
        self.step = 0
        home = plan.layout.of(program.rank)
        for side_name in [name for _, name in plan.phase.reads]:
            content = self.content[program.home_buffer(side_name), side_name]
            for chunk, row in plan.layout.offsets(home).items():
                span = plan.layout.chunks[chunk]
                content.tokens.append((Span(row, row + len(span)), span.lo))
                content.valid.append(Span(row, row + len(span)))

    def fail(self, reason: str) -> PlanError:
        place = (self.step, self.program.rank)
        return PlanError(f"rank {place[1]}, step {place[0]}: {reason}", grid(self.plan, mark=place))

    # The algebra.

    def begin(self, step: int) -> None:
        self.step = step
        self.locked, self.flying = set(), set()
        body = self.program.steps[step]
        for message in body.receives:
            buffer = message.parts[0][0].buffer
            slot = self._slot(buffer)
            if self.touched.get(slot, -1) > body.after:
                raise self.fail(f"memory is overwritten by a message while step {self.touched[slot]} may still use it")
            self._move_in(buffer)
            self.flying.add(slot)

    def open(self, buffer: int) -> None:
        self._move_in(buffer)
        ((name, rows),) = self.program.buffers[buffer].parts
        self.content[buffer, name] = _Content(valid=[Span(0, rows)])

    def compute(self, call: Call) -> None:
        q, kv = self._read(call.q), self._read(call.kv)
        band = _tile_of(call)
        results: dict[str, list[tuple[Span, Tile]]] = {"q": [], "kv": []}
        for q_rows, q_token in q:
            for kv_rows, kv_token in kv:
                part = band.restrict(q_rows, kv_rows)
                if part:
                    tile = part.shift(q_token - q_rows.lo, kv_token - kv_rows.lo).shrink()
                    assert tile is not None
                    results["q"].append((part.q, tile))
                    results["kv"].append((part.kv, tile))
        for (side, _), write in zip(self.program.phase.writes, call.writes):
            rows, tokens = (call.q, q) if side == "q" else (call.kv, kv)
            self._store(write, rows.lo, tokens, results[side])

    def fold(self, fold: Fold) -> None:
        tokens = self._read(fold.source)
        content = self.content[fold.source.buffer, fold.source.name]
        rows = Span(fold.source.lo, fold.source.hi)
        self._store(fold.write, fold.source.lo, tokens, [(r, t) for r, t in content.tiles if len(r & rows)])

    def end(self, step: int) -> None:
        pass

    def take(self, step: int, message: Message) -> tuple[list[_Content], object]:
        payload = []
        for regions in message.parts:
            out, row = _Content(), 0
            for region in regions:
                for rows, token in self._read(region, sent=True):
                    out.tokens.append((rows.shift(row - region.lo), token))
                content = self.content[region.buffer, region.name]
                span = Span(region.lo, region.hi)
                out.tiles += [(r.shift(row - region.lo), t) for r, t in content.tiles if len(r & span)]
                row += region.rows
                if region.name in self.program.phase.write_names:
                    self.tenant.pop(self._slot(region.buffer), None)
            out.valid.append(Span(0, row))
            payload.append(out)
        return payload, message.signature

    def land(self, step: int, message: Message, payload: tuple[list[_Content], object]) -> None:
        contents, signature = payload
        if signature != message.signature:
            raise self.fail(f"R5: rank {message.peer} sends {signature}, but {message.signature} is expected")
        for (region,), content in zip(message.parts, contents):
            self.content[region.buffer, region.name] = content
            self.flying.discard(self._slot(region.buffer))

    # Memory.

    def _slot(self, buffer: int) -> int:
        slot = self.program.buffers[buffer].slot
        return -1 - buffer if slot is None else slot

    def _move_in(self, buffer: int) -> None:
        self.tenant[self._slot(buffer)] = buffer
        for name, _ in self.program.buffers[buffer].parts:
            self.content[buffer, name] = _Content()

    def _read(self, region: Region, sent: bool = False) -> list[Piece]:
        slot, span = self._slot(region.buffer), Span(region.lo, region.hi)
        if self.program.buffers[region.buffer].slot is not None and self.tenant.get(slot) != region.buffer:
            raise self.fail(f"R2: {region} was overwritten, or is not there yet")
        if slot in self.flying:
            raise self.fail(f"R1: {region} is read while its message is on the way")
        content = self.content[region.buffer, region.name]
        if not _covers(content.valid, span):
            raise self.fail(f"{region} is read before anything was stored in it")
        if sent:
            self.locked.add(slot)
            if region.name in self.program.phase.write_names:
                if self.touched.get(slot, -1) > self.program.steps[self.step].after:
                    raise self.fail(f"{region} is sent while step {self.touched[slot]} may still write it")
        else:
            self.touched[slot] = self.step
        return [(rows & span, token + (rows & span).lo - rows.lo) for rows, token in content.tokens if len(rows & span)]

    def _store(self, write: Write, from_row: int, tokens: list[Piece], tiles: list[tuple[Span, Tile]]) -> None:
        region, slot = write.region, self._slot(write.region.buffer)
        if self.program.buffers[region.buffer].slot is not None and self.tenant.get(slot) != region.buffer:
            self._move_in(region.buffer)
        if slot in self.locked:
            raise self.fail(f"R1: {region} is written while it is being sent")
        self.touched[slot] = self.step
        content, span, shift = self.content[region.buffer, region.name], Span(region.lo, region.hi), region.lo - from_row
        if write.fresh and any(len(rows & span) for rows, _ in content.tiles):
            raise self.fail(f"{region} is stored over results it already holds")
        if not write.fresh and not _covers(content.valid, span):
            raise self.fail(f"{region} is folded into before anything was stored in it")
        content.valid.append(span)
        content.tokens += [(rows.shift(shift), token) for rows, token in tokens]
        content.tiles += [(rows.shift(shift), tile) for rows, tile in tiles]


def check_programs(plan: Plan, programs: list[Program]) -> None:
    """Run lowered programs over sets and compare what they computed with the mask.

    Raises:
        PlanError: a result is missing, counted twice, of a wrong pair, stranded, or memory is used while it is in flight.
    """
    algebras = [_Sets(plan, program) for program in programs]
    run_together(programs, algebras)
    for algebra in algebras:
        for side, name in plan.phase.writes:
            content = algebra.content[algebra.program.home_buffer(name), name]
            for chunk, row in plan.layout.offsets(plan.layout.of(algebra.program.rank)).items():
                rows = Span(row, row + len(plan.layout.chunks[chunk]))
                _compare(plan, algebra, side, name, chunk, rows, content)


def _compare(plan: Plan, algebra: _Sets, side: str, name: str, chunk: int, rows: Span, content: _Content) -> None:
    span = plan.layout.chunks[chunk]
    if not _covers(content.valid, rows):
        raise algebra.fail(f"R4: some rows of {name} of chunk {chunk} were never written")
    for piece, token in content.tokens:
        inside = piece & rows
        if len(inside) and token + inside.lo - piece.lo != span.lo + inside.lo - rows.lo:
            raise algebra.fail(f"R4: {name} of chunk {chunk} holds the results of other tokens")
    everything = Span(0, plan.layout.length)
    want = plan.mask.restrict(*((span, everything) if side == "q" else (everything, span)))
    got = [tile for piece, tile in content.tiles if len(piece & rows)]
    right = all(sum(both.area for tile in want if (both := tile & one)) == one.area for one in got)
    disjoint = all((got[a] & got[b]) is None for a in range(len(got)) for b in range(a))
    if not (right and disjoint and sum(t.area for t in got) == sum(t.area for t in want)):
        raise algebra.fail(f"R4: {name} of chunk {chunk} does not hold each pair of the mask exactly once")


def _tile_of(call: Call) -> Tile:
    """The call's band as a tile in the row numbers of its two buffers."""
    offset = call.kv.hi - call.q.hi
    lo = -UNBOUNDED if call.band.left < 0 else offset - call.band.left
    hi = UNBOUNDED if call.band.right < 0 else offset + call.band.right
    return Tile(Span(call.q.lo, call.q.hi), Span(call.kv.lo, call.kv.hi), lo, hi)


def _covers(spans: list[Span], whole: Span) -> bool:
    reached = whole.lo
    for span in sorted(spans):
        if span.lo > reached:
            return reached >= whole.hi
        reached = max(reached, span.hi)
    return reached >= whole.hi


def check(plan: Plan, max_slots: int | None = None) -> list[Program]:
    """Check one phase and return its programs, one per rank.

    Args:
        plan: what to check.
        max_slots: the most slots of messages and remote accumulators that a rank may need; None for no bound.

    Raises:
        PlanError: the plan is wrong, or needs more slots than that.
    """
    programs = lower_all(plan)
    check_programs(plan, programs)
    for program in programs:
        if max_slots is not None and len(program.slots) > max_slots:
            need = f"rank {program.rank} needs {len(program.slots)} slots {program.peak_slots()}, the bound is {max_slots}"
            raise PlanError(need, grid(plan))
    return programs
