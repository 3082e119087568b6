"""Check plans: by their records, and each rank's program by the loop over sets of token pairs.

The two join at the messages. A result is the sum of blocks: it starts empty, moves with its transfers, and is added to
what its destination holds. So the records alone say what each message carries (`carried`). A program is right if it
sends that whenever it receives that, and ends with its own results. Then all programs are right together, step by step.
The bytes of messages are proved too (`prove_arena`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import attrgetter

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.interpret import rank_loop
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.grid import grid, plan_error
from dfa_megatron.plan.language.ir import AttentionPlan, Plan, Transfer
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.landings import ALIGNMENT, Arenas, Landings, landings_of
from dfa_megatron.plan.lowering.lower import lower
from dfa_megatron.plan.lowering.messages import Carried, RankMessages, carried_by
from dfa_megatron.plan.proof.set_algebra import ONE, Content, Sets


def check_plan(plan: AttentionPlan | Plan, *, batch: int = 1, max_slots: int | None = None) -> None:
    """Prove that a plan computes every pair of its mask exactly once and brings every result to its owner.

    The programs that would run are run over sets, so lowering (fused calls, slots, waits) is proved with the plan.

    Args:
        plan: both phases, or one.
        batch: sequences at once; messages share buffers for one sequence only.
        max_slots: the most slots of messages and remote accumulators that a rank may need; None for no bound.

    Raises:
        PlanError: the plan is wrong, or needs more slots than that; the message shows the grid with the failing cell.
    """
    for phase in plan.phases:
        check(phase, batch, max_slots)


def check(plan: Plan, batch: int = 1, max_slots: int | None = None) -> list[Program]:
    """Check one phase, as `check_plan` does, and return its programs, one per rank."""
    landings = landings_of(plan, batch)
    programs = [lower(one) for one in landings]
    check_programs(landings, programs)
    for program in programs:
        if max_slots is not None and len(program.slots) > max_slots:
            need = (
                f"rank {program.rank} needs {len(program.slots)} slots {program.peak_slots()}, the bound is {max_slots}"
            )
            raise PlanError(need, grid(plan))
    return programs


def check_programs(landings: Sequence[Landings], programs: Sequence[Program]) -> None:
    """Prove a plan, and that these programs carry it out, or raise a PlanError.

    landings: of the plan, on all ranks. programs: of all ranks, or of some: a group whose every rank checks its own
    program has checked them all.
    """
    plan = landings[0].plan
    promised = carried(plan)
    for program in programs:
        prove(Sets(plan, program), landings[program.rank].messages, promised)


def prove(algebra: Sets, messages: RankMessages, promised: Carried) -> None:
    """Run one program over sets. What it receives is what was promised; what it sends, and ends with, is compared."""
    plan, program = algebra.plan, algebra.program
    rows = [len(chunk) for chunk in plan.layout.chunks]
    for event, number, step in rank_loop(program, algebra):
        sends = event == "post"
        posted, planned = (step.sends, messages.outgoing) if sends else (step.receives, messages.incoming)
        if [message.peer for message in posted] != list(planned.get(number, {})):
            raise algebra.fail(f"R5: the plan's messages are with ranks {list(planned.get(number, {}))}")
        for message in posted:
            parts = planned[number][message.peer]
            expected = tuple((name, sum(map(rows.__getitem__, chunks))) for name, chunks in parts)
            if message.signature != expected:
                raise algebra.fail(f"R5: a message with rank {message.peer} is {message.signature}, not {expected}")
            ends = (program.rank, message.peer) if sends else (message.peer, program.rank)
            sums = [_sums(plan, promised, number, *ends, *part) for part in parts]
            if not sends:
                landed = zip(parts, sums, strict=True)
                algebra.land(message, [_landed(plan, chunks, tiles) for (_, chunks), tiles in landed])
                continue
            for part, contents, tiles in zip(parts, algebra.take(message), sums, strict=True):
                for content in _unlike(contents):
                    _compare(algebra, *part, content, tiles)
    everything = Span(0, plan.layout.length)
    for side, name in plan.phase.writes:
        spans, home = plan.layout.spans(program.rank, side), program.home_buffer(name)
        pairs = [plan.mask.restrict(*((span, everything) if side == "q" else (everything, span))) for span in spans]
        for content in _unlike(algebra.held(home, name)):
            _compare(algebra, name, plan.layout.of(program.rank, side), content, pairs)


def _unlike(contents: Sequence[Content]) -> list[Content]:
    """Return the first of equal contents."""
    out: list[Content] = []
    for content in contents:
        if not any((content.valid, content.terms) == (other.valid, other.terms) for other in out):
            out.append(content)
    return out


def _sums(
    plan: Plan, promised: Carried, step: int, src: int, dst: int, name: str, chunks: Sequence[int]
) -> list[Sequence[Tile]]:
    """Return the pairs that each of these chunks brings along: of a result, or the tokens of an input."""
    if name not in plan.phase.write_names:
        return [[Tile(plan.layout.chunks[chunk], ONE)] for chunk in chunks]
    sums, pairs = [promised[Transfer(step, src, dst, name, chunk)] for chunk in chunks], plan.pairs
    return [[tile for block in blocks for tile in pairs[block.q_chunk, block.kv_chunk]] for blocks in sums]


def _landed(plan: Plan, chunks: Sequence[int], tiles: Sequence[Sequence[Tile]]) -> Content:
    """Return a part of a message that holds these chunks one after another, and these pairs of each."""
    out, at = Content(), 0
    for chunk, sums in zip(chunks, tiles, strict=True):
        span = plan.layout.chunks[chunk]
        out.put(Span(at, at + len(span)), [(span.lo - at, tile) for tile in sums])
        at += len(span)
    return out


def _compare(
    algebra: Sets, name: str, chunks: Sequence[int], content: Content, tiles: Sequence[Sequence[Tile]]
) -> None:
    """Refuse a content that is not these chunks one after another, with these pairs of each."""
    plan, at = algebra.plan, 0
    for chunk, want in zip(chunks, tiles, strict=True):
        span = plan.layout.chunks[chunk]
        rows, by = Span(at, at + len(span)), span.lo - at
        at += len(span)
        if wrong := _difference(content, rows, by, algebra.side_of[name], want):
            raise algebra.fail(f"R4: {name} of chunk {chunk} {wrong}")


def _difference(content: Content, rows: Span, by: int, side: str, want: Sequence[Tile]) -> str:
    """Describe the error in rows that should hold these pairs, of tokens that are `by` after them; "" if none."""
    if not content.holds(rows):
        return "has rows that were never written"
    terms = content.terms_in(rows, side)
    if any(shift != by for shift, _ in terms):
        return "is that of other tokens"
    got = [tile for _, tile in terms]
    if got == list(want):
        return ""
    if sum(tile.area for tile in got) != sum(tile.area for tile in want):
        return "does not hold each pair of the mask exactly once"
    if not _disjoint(got, side):
        return "counts a pair twice"
    ordered = sorted(want, key=attrgetter("q"))  # most masks have tiles that share no rows
    starts, ends = [tile.q.lo for tile in ordered], [*accumulate((tile.q.hi for tile in ordered), max)]
    near = (ordered[bisect_right(ends, tile.q.lo) : bisect_left(starts, tile.q.hi)] for tile in got)
    return "" if all(map(_inside, got, near)) else "holds a pair that the mask forbids"


def _inside(tile: Tile, tiles: Sequence[Tile]) -> bool:
    """Return whether these disjoint tiles hold every pair of a shrunk one; most often one of them does."""
    if any(other.holds(tile) for other in tiles):
        return True
    return tile.area == sum(both.area for other in tiles if (both := tile & other))


def _disjoint(tiles: Sequence[Tile], side: str) -> bool:
    """Return whether no two tiles share a pair. Sweep them along the other side, where few of them overlap."""
    by_q = side == "kv"
    ordered = sorted(tiles, key=lambda tile: tile.q.lo if by_q else tile.kv.lo)
    for place, tile in enumerate(ordered, 1):
        end = tile.q.hi if by_q else tile.kv.hi
        for other in ordered[place:]:
            if (other.q.lo if by_q else other.kv.lo) >= end:
                break
            if tile & other:
                return False
    return True


def carried(plan: Plan) -> Carried:
    """Return what every transfer of a result carries, after a proof that the owners end with every needed pair once."""
    found, held = carried_by(plan)
    owner, last = plan.layout.owner, plan.steps - 1
    at_owner: dict[str, list[tuple[int, int]]] = {name: [] for name in plan.phase.write_names}
    for (rank, name, chunk), blocks in held.items():
        if blocks and owner[chunk] != rank:
            raise plan_error(plan, f"R4: {name} of chunk {chunk} is stranded on rank {rank}", last, rank)
        at_owner[name] += [(block.q_chunk, block.kv_chunk) for block in blocks]
    for name, pairs in at_owner.items():
        if len(pairs) == len(plan.pairs) and plan.pairs.keys() == set(pairs):
            continue
        count = Counter(pairs)
        wrong = next(pair for pair in (*plan.pairs, *pairs) if count[pair] != 1)
        chunk = wrong[0 if name == plan.phase.write_q else 1]
        how = "counts a pair twice" if count[wrong] else "does not hold each pair of the mask exactly once"
        raise plan_error(plan, f"R4: {name} of chunk {chunk} {how}", last, owner[chunk])
    return found


def prove_arena(program: Program, arenas: Arenas) -> None:
    """Prove that memory of different slots is apart in a rank's arena; senders ask the same `Arenas` where they write.

    Buffers of one slot never live at the same time, which the program's own proof shows.
    """
    spans: dict[int | None, list[tuple[int, int]]] = {}
    for number, starts in arenas.starts_on(program.rank).items():
        buffer, ends = program.buffers[number], list[tuple[int, int]]()
        for name, rows in buffer.parts:
            row_bytes = arenas.row_bytes[name]
            ends += [(start, start + rows * one) for start, one in zip(starts[name], row_bytes, strict=True)]
        ends.sort()
        if any(one[1] > other[0] for one, other in pairwise(ends)) or any(start % ALIGNMENT for start, _ in ends):
            raise PlanError(f"rank {program.rank}: the tensors of buffer {number} overlap, or are not aligned")
        spans.setdefault(buffer.slot, []).append((ends[0][0], ends[-1][1]))
    slots = sorted((min(start for start, _ in its), max(end for _, end in its)) for its in spans.values())
    if any(one[1] > other[0] for one, other in pairwise(slots)) or (slots and slots[-1][1] > arenas.nbytes):
        raise PlanError(f"rank {program.rank}: the slots of messages overlap, or do not fit in {arenas.nbytes} bytes")
