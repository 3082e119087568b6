"""Random changes of a plan: some break it, some only make it another right plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dfa_megatron.plan.language.ir import Block, Plan, Transfer

Change = Callable[[Plan, random.Random], Plan]


def mutate(plan: Plan, rng: random.Random) -> tuple[str, Plan]:
    """A mutant and the names of its changes: mostly one, sometimes two or three."""
    names = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        change = rng.choice([change for change in CHANGES if plan.transfers or change in OF_BLOCKS])
        plan = change(plan, rng)
        names.append(change.__name__)
    return " + ".join(names), plan


def _with(plan: Plan, kind: str, *removed: Any, added: tuple[Any, ...] = ()) -> Plan:
    kept = [record for record in getattr(plan, kind) if record not in removed]
    return replace(plan, **{kind: tuple(sorted([*kept, *added]))})


def _any(plan: Plan, kind: str, rng: random.Random) -> Any:
    if records := getattr(plan, kind):
        return rng.choice(records)
    return Block(0, 0, 0, 0) if kind == "blocks" else Transfer(0, 0, 1 % plan.ranks, plan.phase.read_kv, 0)


def _another(plan: Plan, field: str, old: Any, rng: random.Random) -> Any:
    """Return a value of a field: a step near the old one, a name of the phase, or the number of a rank or a chunk."""
    if field == "step":
        return old + rng.choice([-1, 1, 1, 2])
    if field == "what":
        return rng.choice([name for _, name in (*plan.phase.reads, *plan.phase.writes)])
    return rng.randrange(plan.ranks if field in ("src", "dst", "rank") else len(plan.layout.chunks))


def other(kind: str, *fields: str) -> Change:
    """Give one of these fields of a transfer or block another value."""

    def change(plan: Plan, rng: random.Random) -> Plan:
        one, field = _any(plan, kind, rng), rng.choice(fields)
        value = _another(plan, field, getattr(one, field), rng)
        return _with(plan, kind, one, added=(one._replace(**{field: value}),))

    change.__name__ = f"other {' or '.join(fields)} of {kind}"
    return change


def drop(kind: str) -> Change:
    def change(plan: Plan, rng: random.Random) -> Plan:
        return _with(plan, kind, _any(plan, kind, rng))

    change.__name__ = f"drop of {kind}"
    return change


def repeat_transfer(plan: Plan, rng: random.Random) -> Plan:
    one = _any(plan, "transfers", rng)
    return replace(plan, transfers=(*plan.transfers, one._replace(step=one.step + rng.choice([0, 1]))))


def repeat_block(plan: Plan, rng: random.Random) -> Plan:
    one = _any(plan, "blocks", rng)
    again = one._replace(rank=rng.randrange(plan.ranks), step=rng.randrange(max(1, plan.steps)))
    return replace(plan, blocks=(*plan.blocks, again))


def reverse_transfer(plan: Plan, rng: random.Random) -> Plan:
    one = _any(plan, "transfers", rng)
    return _with(plan, "transfers", one, added=(one._replace(src=one.dst, dst=one.src),))


def detour(plan: Plan, rng: random.Random) -> Plan:
    """Through a third rank, one step longer: right for results, right for inputs if they come early enough."""
    one, via = _any(plan, "transfers", rng), rng.randrange(plan.ranks)
    first = one._replace(dst=via)
    if one.step > 0 and rng.random() < 0.5 and one.what in dict(plan.phase.reads).values():
        return _with(plan, "transfers", one, added=(first._replace(step=one.step - 1), one._replace(src=via)))
    return _with(plan, "transfers", one, added=(first, one._replace(src=via, step=one.step + 1)))


def extra_copy(plan: Plan, rng: random.Random) -> Plan:
    """An input that nobody asked for; harmless if its source has it."""
    chunk, name = rng.randrange(len(plan.layout.chunks)), rng.choice([name for _, name in plan.phase.reads])
    src = plan.layout.owner[chunk] if rng.random() < 0.7 else rng.randrange(plan.ranks)
    copy = Transfer(rng.randrange(max(1, plan.steps)), src, rng.randrange(plan.ranks), name, chunk)
    return _with(plan, "transfers", added=(copy,))


def later_from(plan: Plan, rng: random.Random) -> Plan:
    """Everything from some step on one step later: still right."""
    step = rng.randrange(max(1, plan.steps))
    blocks, transfers = (
        tuple(record._replace(step=record.step + (record.step >= step)) for record in records)
        for records in (plan.blocks, plan.transfers)
    )
    return replace(plan, blocks=blocks, transfers=transfers)


def swap_blocks(plan: Plan, rng: random.Random) -> Plan:
    """Two blocks change places: right where both ranks and steps have what they need."""
    a, b = _any(plan, "blocks", rng), _any(plan, "blocks", rng)
    return _with(plan, "blocks", a, b, added=tuple({a._replace(step=b.step), b._replace(step=a.step)}))


OF_BLOCKS: tuple[Change, ...] = (
    *(drop("blocks"), repeat_block, swap_blocks, later_from),
    *(other("blocks", *fields) for fields in (("step",), ("rank",), ("q_chunk", "kv_chunk"))),
)
CHANGES: tuple[Change, ...] = (
    *(drop("transfers"), repeat_transfer, reverse_transfer, detour, extra_copy),
    *(other("transfers", *fields) for fields in (("step",), ("src", "dst"), ("what",), ("chunk",))),
    *OF_BLOCKS,
)
