"""Draw a plan as a grid of text: a row per step, a column per rank, optionally with one marked cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.ir import Block, Plan


def whose(plan: Plan, chunks: Iterable[int]) -> str:
    """Name chunks by owner: `7` is every chunk of rank 7, `7a` and `7b` its first and its second chunk."""
    by_owner: dict[int, list[int]] = defaultdict(list)
    for chunk in sorted(set(chunks)):
        by_owner[plan.layout.owner[chunk]].append(chunk)
    names = []
    for owner, held in sorted(by_owner.items()):
        everything = plan.layout.of(owner)
        places = [] if len(held) == len(everything) else map(everything.index, held)
        some = (chr(ord("a") + place) if place < 26 else f"[{place}]" for place in places)
        names.append(f"{owner}{''.join(some)}")
    return "+".join(names)


def cell(plan: Plan, blocks: Sequence[Block]) -> str:
    """Describe the work of a rank in a step: owners of rows . owners of keys, and a star for rows of another rank."""
    if not blocks:
        return "-"
    helps = any(plan.layout.owner[block.q_chunk] != block.rank for block in blocks)
    rows, keys = whose(plan, (b.q_chunk for b in blocks)), whose(plan, (b.kv_chunk for b in blocks))
    return f"{rows}.{keys}" + ("*" if helps else "")


def grid(plan: Plan, mark: tuple[int, int] | None = None, width: int = 100) -> str:
    """Draw the grid of a plan, in bands of ranks that fit the width. `mark`, a (step, rank), gets a `<!`."""
    cells: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in plan.blocks:
        cells[block.step, block.rank].append(block)
    known = range(len(plan.layout.chunks))
    texts = {
        place: cell(plan, [b for b in blocks if b.q_chunk in known and b.kv_chunk in known])
        for place, blocks in cells.items()
    }
    if mark is not None:
        texts[mark] = texts.get(mark, "-") + "<!"
    column = max([4, *(len(text) for text in texts.values()), len(f"r{plan.ranks - 1}")]) + 1
    per_band = max(1, (width - 5) // column)
    lines = [f"{plan.phase.name}, {plan.mask.name}, {plan.ranks} ranks: whose rows . whose keys, * for another rank"]
    for first in range(0, plan.ranks, per_band):
        ranks = range(first, min(plan.ranks, first + per_band))
        lines.append("step " + "".join(f"r{rank}".ljust(column) for rank in ranks).rstrip())
        for step in range(max(plan.steps, (mark[0] + 1) if mark else 0)):
            row = "".join(texts.get((step, rank), "-").ljust(column) for rank in ranks)
            lines.append(f"{step:4d} " + row.rstrip())
    return "\n".join(lines)


def plan_error(plan: Plan, reason: str, step: int, rank: int) -> PlanError:
    """Return an error that names a cell of the grid, and shows the grid with that cell marked."""
    return PlanError(f"rank {rank}, step {step}: {reason}", grid(plan, mark=(max(0, step), rank)))
