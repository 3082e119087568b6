"""A plan as a grid of text: a row per step, a column per rank, what each computes; a failing cell can be marked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dfa_megatron.plan.ir import Block, Plan


def cell(plan: Plan, blocks: list[Block]) -> str:
    """What a rank computes in a step, as query chunk . key chunk: `3.1`, several as `6-7.0-1`, helping as `7.0*`."""
    if not blocks:
        return "-"
    home = plan.layout.home
    q = sorted({block.q_chunk for block in blocks})
    kv = sorted({block.kv_chunk for block in blocks})
    helps = any(home[block.q_chunk] != block.rank for block in blocks)
    return f"{chunk_numbers(q)}.{chunk_numbers(kv)}" + ("*" if helps else "")


def grid(plan: Plan, mark: tuple[int, int] | None = None, width: int = 100) -> str:
    """The grid of a plan; `mark` is a (step, rank) that gets a `<!`. Too many ranks for the width fold into bands."""
    cells: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in plan.blocks:
        cells[block.step, block.rank].append(block)
    texts = {place: cell(plan, blocks) for place, blocks in cells.items()}
    if mark is not None:
        texts[mark] = texts.get(mark, "-") + "<!"
    column = max([4, *(len(text) for text in texts.values()), len(f"r{plan.ranks - 1}")]) + 1
    per_band = max(1, (width - 5) // column)
    lines = [f"{plan.phase.name}, {plan.mask.name}, {plan.ranks} ranks; q.kv chunks, * helps another rank"]
    for first in range(0, plan.ranks, per_band):
        ranks = range(first, min(plan.ranks, first + per_band))
        lines.append("step " + "".join(f"r{rank}".ljust(column) for rank in ranks).rstrip())
        for step in range(max(plan.steps, (mark[0] + 1) if mark else 0)):
            row = "".join(texts.get((step, rank), "-").ljust(column) for rank in ranks)
            lines.append(f"{step:4d} " + row.rstrip())
    return "\n".join(lines)


def chunk_numbers(chunks: Sequence[int]) -> str:
    """Ascending chunk numbers: `6`, neighbours as `6-7`, others as `1+14`."""
    if len(chunks) > 1 and chunks[-1] - chunks[0] == len(chunks) - 1:
        return f"{chunks[0]}-{chunks[-1]}"
    return "+".join(map(str, chunks))
