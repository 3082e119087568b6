"""An algebra of sets: values are sets of token pairs, and any access to memory in flight is an error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span, Tile, covers
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Merge, Message, Program, Region, Write

Term = tuple[int, Tile]
"""A set of pairs merged into rows of a buffer: the token on the name's own side is the row plus this number."""


@dataclass(slots=True)
class Content:
    """The content of the rows of one name in one buffer.

    valid: rows that hold anything. tokens: (rows, number); an input's token is its row plus the number. terms: results
    merged into an accumulator.
    """

    valid: list[Span] = field(default_factory=list)
    tokens: list[tuple[Span, int]] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)


def clip(terms: list[Term], rows: Span, side: str) -> list[Term]:
    """Return the part of the terms in these rows."""
    by_q, out = side == "q", list[Term]()
    for term in terms:
        shift, tile = term
        own, lo, hi = tile.q if by_q else tile.kv, rows.lo + shift, rows.hi + shift
        if lo <= own.lo and own.hi <= hi:
            out.append(term)
        elif lo < own.hi and own.lo < hi:
            tokens = Span(lo, hi)
            if part := tile.restrict(tokens, tile.kv) if by_q else tile.restrict(tile.q, tokens):
                out.append((shift, part))
    return out


class Sets:
    """One rank of the checker."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program, self.step = plan, program, 0
        self.content: dict[tuple[int, str], Content] = defaultdict(Content)
        self.tenant: dict[int, int] = {}
        self.sending: set[int] = set()
        self.landing: Counter[int] = Counter()
        self.gone: set[int] = set()
        self.touched: dict[int, int] = {}
        self.side_of = {name: side for side, name in plan.phase.writes}
        self._refuse_unequal_tenants()
        for _, name in plan.phase.reads:
            content = self.content[program.home_buffer(name), name]
            for chunk, row in plan.layout.offsets(plan.layout.of(program.rank)).items():
                span = plan.layout.chunks[chunk]
                _append(content.tokens, Span(row, row + len(span)), span.lo - row)
            content.valid = [Span(0, content.tokens[-1][0].hi)]

    def fail(self, reason: str) -> PlanError:
        """Raise an error that marks this rank's cell in the grid."""
        place = (self.step, self.program.rank)
        return PlanError(f"rank {place[1]}, step {place[0]}: {reason}", grid(self.plan, mark=place))

    # The algebra.

    def begin(self, step: int) -> None:
        """Give the receive buffers of this step to its messages."""
        self.step, self.sending, self.landing = step, set(), Counter()
        body = self.program.steps[step]
        landed = [regions[0].buffer for message in body.receives for regions in message.parts]
        for buffer in dict.fromkeys(landed):
            slot = self._slot(buffer)
            if self.touched.get(slot, -1) > body.after:
                raise self.fail(f"memory is overwritten by a message while step {self.touched[slot]} may still use it")
            self._move_in(buffer)
        self.landing.update(map(self._slot, landed))

    def open(self, buffer: int) -> None:
        """Fill an accumulator with the identity of the merge: a valid, empty set."""
        self._refuse_in_flight(buffer, "set")
        self._move_in(buffer)
        self.touched[self._slot(buffer)] = self.step
        for name, rows in self.program.buffers[buffer].parts:
            self.content[buffer, name] = Content(valid=[Span(0, rows)])

    def compute(self, call: Call) -> None:
        """Merge the pairs of the call's segments, as tokens, into its writes."""
        q, kv = self._read(call.q).tokens, self._read(call.kv).tokens
        tiles = [
            (q_shift, kv_shift, part.shift(q_shift, kv_shift))
            for tile in self._segments(call)
            for q_rows, q_shift in _among(q, tile.q)
            for kv_rows, kv_shift in _among(kv, tile.kv)
            if (part := tile.restrict(q_rows, kv_rows))
        ]
        for (side, _), write in zip(self.program.phase.writes, call.writes, strict=True):
            source = call.q if side == "q" else call.kv
            by = write.region.lo - source.lo
            terms = [((q_shift if side == "q" else kv_shift) - by, tile) for q_shift, kv_shift, tile in tiles]
            self._store(write, source.rows, terms)

    def _segments(self, call: Call) -> list[Tile]:
        """Return the call's segments as tiles in the rows of its two buffers."""
        q, kv, ends = 0, 0, (call.q.rows, call.kv.rows)
        for segment in call.segments:
            if not (q <= segment.q_lo < segment.q_hi and kv <= segment.kv_lo < segment.kv_hi):
                raise self.fail(f"the segments of {call.q} x {call.kv} are empty, overlap, or are out of order")
            q, kv = segment.q_hi, segment.kv_hi
        first, alone = call.segments[:1], len(call.segments) == 1
        inside = bool(first) and q <= ends[0] and kv <= ends[1]
        if not inside or (alone and (first[0].q_lo, first[0].kv_lo, q, kv) != (0, 0, *ends)):
            raise self.fail(f"the segments of {call.q} x {call.kv} do not fit it")
        return [segment.tile.shift(call.q.lo, call.kv.lo) for segment in call.segments]

    def merge(self, merge: Merge) -> None:
        """Add a landed partial to an accumulator."""
        by = merge.write.region.lo - merge.source.lo
        terms = [(shift - by, tile) for shift, tile in self._read(merge.source).terms]
        self._store(merge.write, merge.source.rows, terms)

    def end(self, step: int) -> None:
        """Drop the accumulators that this step sent."""
        for slot in self.gone:
            self.tenant.pop(slot, None)
        self.gone = set()

    def take(self, message: Message) -> list[Content]:
        """Return what each part of a message that is sent carries, from row 0 on."""
        parts = []
        for regions in message.parts:
            out, at = Content(), 0
            for region in regions:
                content, by = self._read(region, sent=True), at - region.lo
                out.tokens += [(rows.shift(by), shift - by) for rows, shift in content.tokens]
                out.terms += [(shift - by, tile) for shift, tile in content.terms]
                at += region.rows
                if region.name in self.side_of:
                    self.gone.add(self._slot(region.buffer))
            out.valid = [Span(0, at)]
            parts.append(out)
        return parts

    def land(self, message: Message, contents: Sequence[Content]) -> None:
        """Record a landed message; fail if its place is wrong or its memory was given to another buffer."""
        for regions, content in zip(message.parts, contents, strict=True):
            region = regions[0]
            there, rows = self.content[region.buffer, region.name], Span(region.lo, region.hi)
            inside = region.lo >= 0 and region.hi <= dict(self.program.buffers[region.buffer].parts)[region.name]
            taken = self.tenant.get(self._slot(region.buffer)) != region.buffer
            if len(regions) != 1 or not inside or taken or _meet(there.valid, rows):
                raise self.fail(f"R1: {region} is no place for a message to land in")
            if there.valid and there.valid[-1].hi == rows.lo:
                rows = Span(there.valid.pop().lo, rows.hi)
            there.valid.append(rows)
            there.tokens += [(span.shift(region.lo), shift - region.lo) for span, shift in content.tokens]
            there.terms += [(shift - region.lo, tile) for shift, tile in content.terms]
            self.landing[self._slot(region.buffer)] -= 1

    # Memory.

    def _refuse_unequal_tenants(self) -> None:
        kinds: dict[int, bool] = {}
        for buffer in self.program.buffers:
            if buffer.slot is not None and kinds.setdefault(buffer.slot, buffer.accumulates) != buffer.accumulates:
                raise self.fail(f"slot {buffer.slot} is shared by accumulators and messages")

    def _slot(self, buffer: int) -> int:
        slot = self.program.buffers[buffer].slot
        return -1 - buffer if slot is None else slot

    def _move_in(self, buffer: int) -> None:
        self.tenant[self._slot(buffer)] = buffer
        for name, _ in self.program.buffers[buffer].parts:
            self.content[buffer, name] = Content()

    def _refuse_in_flight(self, buffer: int, how: str) -> None:
        if self._slot(buffer) in self.sending:
            raise self.fail(f"R1: buffer {buffer} is {how} while it is being sent")
        if self.landing.get(self._slot(buffer)):
            raise self.fail(f"R1: buffer {buffer} is {how} while a message is landing in it")

    def _read(self, region: Region, sent: bool = False) -> Content:
        """Return the part of a content that lies in a region; row numbers stay those of the buffer."""
        slot, rows = self._slot(region.buffer), Span(region.lo, region.hi)
        if self.program.buffers[region.buffer].slot is not None and self.tenant.get(slot) != region.buffer:
            raise self.fail(f"R2: {region} was overwritten, or is not there yet")
        if self.landing.get(slot):
            raise self.fail(f"R1: {region} is read while its message is on the way")
        content = self.content[region.buffer, region.name]
        if not covers(content.valid, rows):
            raise self.fail(f"{region} is read before anything was stored in it")
        if not sent:
            self.touched[slot] = self.step
        elif region.name in self.side_of and self.touched.get(slot, -1) > self.program.steps[self.step].after:
            raise self.fail(f"{region} is sent while step {self.touched[slot]} may still write it")
        else:
            self.sending.add(slot)
        tokens = [(span & rows, shift) for span, shift in _among(content.tokens, rows)]
        terms = clip(content.terms, rows, self.side_of[region.name]) if content.terms else []
        return Content([rows], tokens, terms)

    def _store(self, write: Write, rows: int, terms: list[Term]) -> None:
        region, slot = write.region, self._slot(write.region.buffer)
        buffer = self.program.buffers[region.buffer]
        if region.rows != rows or region.lo < 0 or region.hi > dict(buffer.parts).get(region.name, 0):
            raise self.fail(f"{region} is no place for a result of {rows} rows")
        self._refuse_in_flight(region.buffer, "written")
        if buffer.slot is not None and self.tenant.get(slot) != region.buffer:
            self._move_in(region.buffer)
        self.touched[slot] = self.step
        content, span = self.content[region.buffer, region.name], Span(region.lo, region.hi)
        if write.fresh and clip(content.terms, span, self.side_of[region.name]):
            raise self.fail(f"{region} is stored over results that it already holds")
        if write.fresh:
            content.valid.append(span)
        elif not covers(content.valid, span):
            raise self.fail(f"{region} is merged into before anything was stored in it")
        content.terms += terms


def _meet(spans: list[Span], rows: Span) -> bool:
    return any(span.lo < rows.hi and rows.lo < span.hi for span in spans)


def _among(tokens: list[tuple[Span, int]], rows: Span) -> list[tuple[Span, int]]:
    """Return the tokens that lie in some of these rows."""
    return [(span, shift) for span, shift in tokens if span.lo < rows.hi and rows.lo < span.hi]


def _append(tokens: list[tuple[Span, int]], rows: Span, shift: int) -> None:
    """Append rows and their tokens, joined to the last ones where they continue them."""
    if tokens and tokens[-1][0].hi == rows.lo and tokens[-1][1] == shift:
        rows = Span(tokens.pop()[0].lo, rows.hi)
    tokens.append((rows, shift))
