"""An algebra of sets: values are sets of token pairs, and any access to memory in flight is an error."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.interpret import Accumulator, accumulator_of
from dfa_megatron.plan.language.geometry import Span, Tile, covers, joined_spans
from dfa_megatron.plan.language.grid import plan_error
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Launch, Merge, Message, Program, Region

if TYPE_CHECKING:
    from dfa_megatron.plan.proof.judge import Judge

Term = tuple[int, Tile]
"""A set of pairs merged into rows of a buffer: the token on the name's own side is the row plus this number."""

ONE = Span(0, 1)
"""The keys of an input's pairs: each of its tokens is a pair with token 0, on side q."""


@dataclass(slots=True)
class Content:
    """The content of the rows of one name in one buffer.

    valid: spans of rows that hold anything, in order and apart. terms: what the rows hold, for each of `valid`. once: a
    result, whose rows are written once.
    """

    valid: list[Span] = field(default_factory=list)
    terms: list[list[Term]] = field(default_factory=list)
    once: bool = False

    def near(self, rows: Span) -> slice:
        """Return which of `valid` meet some rows."""
        first = bisect_right(self.valid, rows.lo, key=attrgetter("hi"))
        return slice(first, bisect_left(self.valid, rows.hi, first, key=attrgetter("lo")))

    def holds(self, rows: Span) -> bool:
        """Return whether all of these rows hold something."""
        return covers(self.valid[self.near(rows)], rows)

    def terms_in(self, rows: Span, side: str) -> list[Term]:
        """Return the part of the terms in these rows."""
        near = self.near(rows)
        parts = zip(self.valid[near], self.terms[near], strict=True)
        return [term for span, terms in parts for term in (terms if rows.holds(span) else clip(terms, rows, side))]

    def put(self, rows: Span, terms: list[Term], side: str = "") -> None:
        """Let rows hold these terms, in place of those that they held."""
        near = self.near(rows)
        old = self.valid[near] or [rows]
        before, after = Span(old[0].lo, rows.lo), Span(rows.hi, old[-1].hi)
        new = [(rest, self.terms_in(rest, side)) for rest in (before, after) if len(rest)]
        new.insert(len(before) > 0, (rows, terms))
        self.valid[near], self.terms[near] = [span for span, _ in new], [terms for _, terms in new]


def clip(terms: Iterable[Term], rows: Span, side: str) -> list[Term]:
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


class View(NamedTuple):
    """Rows of a content."""

    content: Content
    span: Span


@dataclass(frozen=True, slots=True)
class SetMemory:
    """The memory of an accumulator of sets, see `plan.interpret`.

    side: q or kv, whose rows they are. in_place: a sum lies in the result. adopts: a partial's memory may become the
    result, and a kernel writes where the accumulator says. judge: of a fixed order, which every merge has to follow.
    """

    side: str
    in_place: bool
    adopts: bool
    judge: Judge | None = None

    def new(self, rows: int, sum: bool) -> View:
        return View(Content(once=not (sum or self.in_place)), Span(0, rows))

    def part(self, rows: View, lo: int, hi: int) -> View:
        """Return fewer rows, or raise a LookupError: there are no such rows."""
        if not 0 <= lo <= hi <= len(rows.span):
            raise LookupError(f"rows {lo} to {hi} of {len(rows.span)}")
        return View(rows.content, Span(rows.span.lo + lo, rows.span.lo + hi))

    def merge(self, parts: list[View], into: View) -> None:
        """Write the sum of sets in place of what the rows held; a single part may lie there already.

        A part whose rows hold nothing is a LookupError. So are rows of a result that are written again: in a partial's
        memory they would count twice.
        """
        if [(id(content), span) for content, span in parts] == [(id(into.content), into.span)]:
            return
        found: list[list[Term]] = []
        for content, span in parts:
            if not content.holds(span):
                raise LookupError("rows that hold nothing are merged")
            by = span.lo - into.span.lo
            found.append([(shift + by, tile) for shift, tile in content.terms_in(span, self.side)])
        if self.judge is not None and len(parts) > 1:
            self.judge.check(found, into.span)
        terms = [term for part in found for term in part]
        if into.content.once and into.content.valid[into.content.near(into.span)]:
            raise LookupError("rows of a result are written twice")
        into.content.put(into.span, terms, self.side)

    def clear(self, rows: View) -> None:
        self.merge([], rows)

    def fits(self, partial: View, rows: int) -> bool:
        return self.adopts and partial.span == Span(0, rows)


WAYS = ((False, False), (False, True), (True, True))
"""(in_place, adopts) of results whose sums have another dtype, and of those whose sums have theirs."""


class Sets:
    """One rank of the checker. Every accumulator is filled in each of `WAYS`."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program, self.step = plan, program, 0
        self.content: dict[tuple[int, str], Content] = defaultdict(Content)
        self.tenant: dict[int, int] = {}
        self.sending: set[int] = set()
        self.landing: Counter[int] = Counter()
        self.gone: set[int] = set()
        self.touched: dict[int, int] = {}
        self.results = {name: side for side, name in plan.phase.writes}
        self.side_of = {name: "q" for _, name in plan.phase.reads} | self.results
        self._refuse_unequal_tenants()
        for side, name in plan.phase.reads:
            content, row = self.content[program.home_buffer(name), name], 0
            for span in joined_spans(plan.layout.spans(program.rank, side)):
                content.put(Span(row, row + len(span)), [(span.lo - row, Tile(span, ONE))])
                row += len(span)
        self.judges: dict[str, Judge] = {}
        if plan.order is not None:
            from dfa_megatron.plan.proof.judge import Judge  # which other plans need not load

            self.judges = {side: Judge(plan, side, plan.order) for side in self.results.values()}
        memories = {
            name: [SetMemory(side, *way, self.judges.get(side)) for way in WAYS] for name, side in self.results.items()
        }
        self.accumulators = {
            number: [accumulator_of(buffer.merges, buffer.parts[0][1], one) for one in memories[buffer.parts[0][0]]]
            for number, buffer in enumerate(program.buffers)
            if buffer.merges is not None
        }

    def fail(self, reason: str) -> PlanError:
        """Return an error that marks this rank's cell in the grid."""
        return plan_error(self.plan, reason, self.step, self.program.rank)

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

    def compute(self, call: Call) -> None:
        """Merge the pairs of the call's segments, as tokens, into its writes."""
        q, kv = (
            [(tile.q.shift(-shift), shift) for shift, tile in self._read(region)[0].terms[0]]
            for region in (call.q, call.kv)
        )
        tiles = [
            (q_shift, kv_shift, part.shift(q_shift, kv_shift))
            for tile in (each.shift(call.q.lo, call.kv.lo) for each in self._launched(call))
            for q_rows, q_shift in _among(q, tile.q)
            for kv_rows, kv_shift in _among(kv, tile.kv)
            if (part := tile.restrict(q_rows, kv_rows))
        ]
        if self.judges and not self.judges["q"].whole([tile for _, _, tile in tiles]):
            raise self.fail(f"a segment of {call.q} x {call.kv} is no whole leaf of the fixed order")
        sources = [(call.q.rows, [(shift + call.q.lo, tile) for shift, _, tile in tiles])]
        if self.program.phase.write_kv:
            sources.append((call.kv.rows, [(shift + call.kv.lo, tile) for _, shift, tile in tiles]))
        for into, (count, terms) in zip(call.writes, sources, strict=True):
            rows = Span(0, into.rows)
            self._store(into, count, View(Content([rows], terms=[terms]), rows), of_kernel=True)

    def _launched(self, call: Call) -> list[Tile]:
        """Return what the call's launches compute, as tiles in its rows."""
        where, written, rows, keys = f"{call.q} x {call.kv}", list[Span](), Span(0, call.q.rows), Span(0, call.kv.rows)
        for launch in call.launches:
            if not (_inside(launch.q, rows) and _inside(launch.kv, keys, apart=False)):
                raise self.fail(f"a launch of {where} has other rows, or some of them twice")
            if not _in_order(launch):
                raise self.fail(f"the segments of {where} are empty, overlap, are out of order, or do not fit it")
            written += launch.written()
        if not _inside(sorted(written), rows):
            raise self.fail(f"query rows of {where} are in two launches")
        return [tile for launch in call.launches for tile in launch.tiles()]

    def merge(self, merge: Merge) -> None:
        source = merge.source
        self._read(source)
        landed = View(self.content[source.buffer, source.name], Span(source.lo, source.hi))
        self._store(merge.write, source.rows, landed)

    def end(self, step: int) -> None:
        """Drop the accumulators that this step sent."""
        for slot in self.gone:
            self.tenant.pop(slot, None)
        self.gone = set()

    def take(self, message: Message) -> list[list[Content]]:
        """Return what each part of a message that is sent carries, from row 0 on; a result's in each of `WAYS`."""
        parts = []
        for regions in message.parts:
            outs, at = [Content() for _ in (WAYS if regions[0].name in self.results else "1")], 0
            for region in regions:
                by = at - region.lo
                for out, content in zip(outs, self._read(region, sent=True), strict=True):
                    for rows, terms in zip(content.valid, content.terms, strict=True):
                        out.put(rows.shift(by), [(shift - by, tile) for shift, tile in terms])
                at += region.rows
                if region.name in self.results:
                    self.gone.add(self._slot(region.buffer))
            parts.append(outs)
        return parts

    def land(self, message: Message, contents: Sequence[Content]) -> None:
        """Record a landed message; fail if its place is wrong or its memory was given to another buffer."""
        for regions, content in zip(message.parts, contents, strict=True):
            region = regions[0]
            there, rows = self.content[region.buffer, region.name], Span(region.lo, region.hi)
            inside = region.lo >= 0 and region.hi <= dict(self.program.buffers[region.buffer].parts)[region.name]
            taken = self.tenant.get(self._slot(region.buffer)) != region.buffer
            if len(regions) != 1 or not inside or taken or there.valid[there.near(rows)]:
                raise self.fail(f"R1: {region} is no place for a message to land in")
            for span, terms in zip(content.valid, content.terms, strict=True):
                there.put(span.shift(region.lo), [(shift - region.lo, tile) for shift, tile in terms])
            self.landing[self._slot(region.buffer)] -= 1

    # Memory.

    def _refuse_unequal_tenants(self) -> None:
        messages = {buffer.slot for buffer in self.program.buffers if buffer.merges is None}
        results = {buffer.slot for buffer in self.program.buffers if buffer.merges is not None}
        if shared := (messages & results) - {None}:
            raise self.fail(f"slots {shared} are shared by accumulators and messages")

    def _slot(self, buffer: int) -> int:
        slot = self.program.buffers[buffer].slot
        return -1 - buffer if slot is None else slot

    def _move_in(self, buffer: int) -> None:
        before = self.tenant.get(self._slot(buffer), buffer)
        for name, _ in self.program.buffers[before].parts:
            gone = self.content[before, name]  # who still has a view of it sees that it is gone
            gone.valid, gone.terms = [], []
        self.tenant[self._slot(buffer)] = buffer
        for name, _ in self.program.buffers[buffer].parts:
            self.content[buffer, name] = Content()

    def _refuse_in_flight(self, buffer: int, how: str) -> None:
        if self._slot(buffer) in self.sending:
            raise self.fail(f"R1: buffer {buffer} is {how} while it is being sent")
        if self.landing.get(self._slot(buffer)):
            raise self.fail(f"R1: buffer {buffer} is {how} while a message is landing in it")

    def _read(self, region: Region, sent: bool = False) -> list[Content]:
        """Return the part of a buffer's contents that lies in a region; row numbers stay those of the buffer."""
        slot, rows = self._slot(region.buffer), Span(region.lo, region.hi)
        if self.program.buffers[region.buffer].slot is not None and self.tenant.get(slot) != region.buffer:
            raise self.fail(f"R2: {region} was overwritten, or is not there yet")
        if self.landing.get(slot):
            raise self.fail(f"R1: {region} is read while its message is on the way")
        contents = self.held(region.buffer, region.name)
        if not all(content.holds(rows) for content in contents):
            raise self.fail(f"{region} is read before anything was stored in it")
        if not sent:
            self.touched[slot] = self.step
        elif region.name in self.results and self.touched.get(slot, -1) > self.program.steps[self.step].after:
            raise self.fail(f"{region} is sent while step {self.touched[slot]} may still write it")
        else:
            self.sending.add(slot)
        return [Content([rows], [content.terms_in(rows, self.side_of[region.name])]) for content in contents]

    def held(self, buffer: int, name: str) -> list[Content]:
        """Return what a buffer holds of a name; of an accumulator in each of `WAYS`."""
        filled = self.accumulators.get(buffer)
        return [self.content[buffer, name]] if filled is None else [one.result().content for one in filled]

    def _store(self, into: Region, rows: int, partial: View, *, of_kernel: bool = False) -> None:
        slot, buffer = self._slot(into.buffer), self.program.buffers[into.buffer]
        if into.rows != rows or into.lo < 0 or into.hi > dict(buffer.parts).get(into.name, 0):
            raise self.fail(f"{into} is no place for a result of {rows} rows")
        self._refuse_in_flight(into.buffer, "written")
        if buffer.slot is not None and self.tenant.get(slot) != into.buffer:
            self._move_in(into.buffer)
        self.touched[slot] = self.step
        try:
            for accumulator in self.accumulators[into.buffer]:
                self._write(accumulator, partial, of_kernel=of_kernel)
        except LookupError as error:
            raise self.fail(f"a partial of {into} is not merged as planned: {error}") from error

    def _write(self, accumulator: Accumulator[View], partial: View, *, of_kernel: bool) -> None:
        """Write one partial; a kernel's own memory, or where the accumulator tells the kernel to write."""
        memory = accumulator.memory
        assert isinstance(memory, SetMemory)
        if of_kernel and memory.adopts:
            place = accumulator.destination()
            if place is not None and len(place.span) == len(partial.span):
                memory.merge([partial], place)
                partial = place
            else:
                content = partial.content
                partial = View(replace(content, valid=[*content.valid], terms=[*content.terms]), partial.span)
        accumulator.write(partial)


def _in_order(launch: Launch) -> bool:
    """Return whether segments follow one another in a launch. A single one has all rows, varlen ones have all keys."""
    q_len, kv_len = (sum(map(len, spans)) for spans in (launch.q, launch.kv))
    q = kv = 0
    varlen = launch.window is not None
    for segment in launch.segments:
        if not (q <= segment.q_lo < segment.q_hi and kv <= segment.kv_lo < segment.kv_hi):
            return False
        if varlen and kv != segment.kv_lo:
            return False
        q, kv = segment.q_hi, segment.kv_hi
    if len(launch.segments) == 1 and not varlen:
        return launch.segments[0].tile[:2] == (Span(0, q_len), Span(0, kv_len))
    return q <= q_len and (kv == kv_len if varlen else kv <= kv_len)


def _inside(spans: Sequence[Span], rows: Span, *, apart: bool = True) -> bool:
    """Return whether spans lie in some rows and, if asked, one after another without common rows."""
    if any(not len(span) or not rows.holds(span) for span in spans):
        return False
    return not apart or all(before.hi <= after.lo for before, after in pairwise(spans))


def _among(tokens: list[tuple[Span, int]], rows: Span) -> list[tuple[Span, int]]:
    """Return the tokens that lie in some of these rows."""
    return [(span, shift) for span, shift in tokens if span.lo < rows.hi and rows.lo < span.hi]
