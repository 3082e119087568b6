"""What a plan may say at all: records of ranks, chunks and names that exist, nothing twice, no accumulator taken from home."""

from __future__ import annotations

from typing import NoReturn

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.grid import grid
from dfa_megatron.plan.ir import Plan


def validate(plan: Plan) -> None:
    """Refuse records that cannot be run on any rank.

    Raises:
        PlanError: names the first such record, with the grid.
    """

    def fail(reason: str, step: int, rank: int) -> NoReturn:
        raise PlanError(reason, grid(plan, mark=(max(0, step), rank)))

    chunks, ranks = range(len(plan.layout.chunks)), range(plan.ranks)
    names = {name for _, name in plan.phase.reads} | set(plan.phase.write_names)
    if len(set(plan.transfers)) != len(plan.transfers):
        fail("a transfer is written twice", 0, 0)
    for t in plan.transfers:
        known = t.src in ranks and t.dst in ranks and t.chunk in chunks and t.what in names
        if not known or t.step < 0 or t.src == t.dst:
            fail(f"{t} is no transfer of a {plan.phase.name} plan on {plan.ranks} ranks", t.step, t.src)
        if t.what in plan.phase.write_names and plan.layout.home[t.chunk] == t.src:
            fail(f"R3: {t} takes an accumulator away from its home", t.step, t.src)
    for b in plan.blocks:
        if b.step < 0 or b.rank not in ranks or b.q_chunk not in chunks or b.kv_chunk not in chunks:
            fail(f"{b} is no block of a plan on {plan.ranks} ranks", b.step, b.rank)
        if not plan.tiles(b):
            fail(f"{b} holds no pair of the mask", b.step, b.rank)
