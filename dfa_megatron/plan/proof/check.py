"""Check plans by the loop over sets of token pairs; a plan is accepted if and only if its results are right."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.interpret import run_together
from dfa_megatron.plan.language.geometry import Span, Tile, covers
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import AttentionPlan, Plan
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.proof.set_algebra import Content, Sets, clip


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


def check(plan: Plan, batch: int = 1, max_slots: int | None = None, rank: int | None = None) -> list[Program]:
    """Check one phase, as `check_plan` does, and return its programs, one per rank.

    rank: whose results are compared with the mask; None for all. Every rank of a group compares its own.
    """
    programs = lower_all(plan, batch)
    check_programs(plan, programs, rank)
    for program in programs:
        if max_slots is not None and len(program.slots) > max_slots:
            need = (
                f"rank {program.rank} needs {len(program.slots)} slots {program.peak_slots()}, the bound is {max_slots}"
            )
            raise PlanError(need, grid(plan))
    return programs


def check_programs(plan: Plan, programs: Sequence[Program], rank: int | None = None) -> None:
    """Run lowered programs over sets and compare the results of one rank, or of all, with the mask.

    Raises:
        PlanError: a result is missing, counted twice, wrong or stranded, or memory in flight is touched.
    """
    algebras = [Sets(plan, program) for program in programs]
    run_together(programs, algebras)
    for algebra in algebras if rank is None else algebras[rank : rank + 1]:
        for side, name in plan.phase.writes:
            content = algebra.content[algebra.program.home_buffer(name), name]
            for chunk, row in plan.layout.offsets(plan.layout.of(algebra.program.rank)).items():
                wrong = _difference(plan, side, chunk, row, content)
                if wrong:
                    raise algebra.fail(f"R4: {name} of chunk {chunk} {wrong}")


def _difference(plan: Plan, side: str, chunk: int, row: int, content: Content) -> str:
    """Describe the error in an accumulator that should hold every pair of a chunk; return "" if there is none."""
    span, everything = plan.layout.chunks[chunk], Span(0, plan.layout.length)
    rows = Span(row, row + len(span))
    if not covers(content.valid, rows):
        return "has rows that were never written"
    terms = clip(content.terms, rows, side)
    if any(shift != span.lo - row for shift, _ in terms):
        return "holds the results of other tokens"
    got = [tile for _, tile in terms]
    want = plan.mask.restrict(*((span, everything) if side == "q" else (everything, span)))
    if len(got) == len(want) and set(got) == set(want):
        return ""
    if sum(tile.area for tile in got) != sum(tile.area for tile in want):
        return "does not hold each pair of the mask exactly once"
    if not _disjoint(got, side):
        return "counts a pair twice"
    if any(_common_area(tile, want) != tile.area for tile in got):
        return "holds a pair that the mask forbids"
    return ""


def _common_area(tile: Tile, tiles: Sequence[Tile]) -> int:
    return sum(both.area for other in tiles if (both := tile & other))


def _disjoint(tiles: Sequence[Tile], side: str) -> bool:
    """Return whether no two tiles share a pair. Sweep them along the other side, where few of them overlap."""
    spans = sorted((tile.kv if side == "q" else tile.q, number) for number, tile in enumerate(tiles))
    for place, (span, number) in enumerate(spans):
        for other, another in spans[place + 1 :]:
            if other.lo >= span.hi:
                break
            if tiles[number] & tiles[another]:
                return False
    return True
