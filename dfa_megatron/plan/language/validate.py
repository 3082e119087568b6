"""Refuse malformed plans: unknown ranks, chunks or names, repeated records, results taken from their owner."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import Block, Plan, Transfer


def validate(plan: Plan) -> None:
    """Refuse records that cannot run on any rank.

    Raises:
        PlanError: names the first such record, with the grid.
    """
    _validate_layout(plan)
    _refuse_repeats(plan)
    chunks, ranks, owner = range(len(plan.layout.chunks)), range(plan.ranks), plan.layout.owner
    results = plan.phase.write_names
    names = {name for _, name in plan.phase.reads} | set(results)
    for t in plan.transfers:
        step, src, dst, what, chunk = t
        known = src in ranks and dst in ranks and chunk in chunks and what in names
        if not known or step < 0 or src == dst:
            _fail(plan, f"{t} is no transfer of a {plan.phase.name} plan on {plan.ranks} ranks", t)
        if what in results and owner[chunk] == src:
            _fail(plan, f"R3: {t} takes an accumulator away from its owner", t)
    for b in plan.blocks:
        step, rank, q, kv = b
        if step < 0 or rank not in ranks or (q, kv) not in plan.pairs:
            known = step >= 0 and rank in ranks and q in chunks and kv in chunks
            why = "holds no pair of the mask" if known else f"is no block of a plan on {plan.ranks} ranks"
            _fail(plan, f"{b} {why}", b)


def _validate_layout(plan: Plan) -> None:
    length, spans = plan.mask.length, sorted([(chunk.lo, chunk.hi) for chunk in plan.layout.chunks])
    if any(end != lo or hi < lo for (_, end), (lo, hi) in pairwise([(0, 0), *spans, (length, length)])):
        raise PlanError(f"the chunks are no disjoint cover of the mask's {plan.mask.length} tokens")
    if len(plan.layout.owner) != len(plan.layout.chunks) or min(plan.layout.owner) < 0:
        raise PlanError("every chunk needs one owner")


def _refuse_repeats(plan: Plan) -> None:
    records: tuple[Block | Transfer, ...] = (*plan.blocks, *plan.transfers)
    if len(set(records)) < len(records):
        record = next(record for record in records if records.count(record) > 1)
        _fail(plan, f"{record} is written twice", record)


def _fail(plan: Plan, reason: str, record: Block | Transfer) -> NoReturn:
    rank = record.src if isinstance(record, Transfer) else record.rank
    raise PlanError(reason, grid(plan, mark=(max(0, record.step), rank)))
