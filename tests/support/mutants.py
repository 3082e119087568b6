"""Random changes of a plan: some break it, some only make it another right plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

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


def _transfers(plan: Plan, *removed: Transfer, added: tuple[Transfer, ...] = ()) -> Plan:
    return replace(plan, transfers=tuple(sorted([t for t in plan.transfers if t not in removed] + list(added))))


def _blocks(plan: Plan, *removed: Block, added: tuple[Block, ...] = ()) -> Plan:
    return replace(plan, blocks=tuple(sorted([b for b in plan.blocks if b not in removed] + list(added))))


def _any_transfer(plan: Plan, rng: random.Random) -> Transfer:
    return rng.choice(plan.transfers) if plan.transfers else Transfer(0, 0, 1 % plan.ranks, plan.phase.read_kv, 0)


def _any_block(plan: Plan, rng: random.Random) -> Block:
    return rng.choice(plan.blocks) if plan.blocks else Block(0, 0, 0, 0)


def drop_transfer(plan: Plan, rng: random.Random) -> Plan:
    return _transfers(plan, _any_transfer(plan, rng))


def repeat_transfer(plan: Plan, rng: random.Random) -> Plan:
    one = _any_transfer(plan, rng)
    return replace(plan, transfers=(*plan.transfers, one._replace(step=one.step + rng.choice([0, 1]))))


def delay_transfer(plan: Plan, rng: random.Random) -> Plan:
    one = _any_transfer(plan, rng)
    return _transfers(plan, one, added=(one._replace(step=one.step + rng.choice([-1, 1, 1, 2])),))


def redirect_transfer(plan: Plan, rng: random.Random) -> Plan:
    one, end = _any_transfer(plan, rng), rng.choice(["src", "dst"])
    return _transfers(plan, one, added=(one._replace(**{end: rng.randrange(plan.ranks)}),))


def reverse_transfer(plan: Plan, rng: random.Random) -> Plan:
    one = _any_transfer(plan, rng)
    return _transfers(plan, one, added=(one._replace(src=one.dst, dst=one.src),))


def rename_transfer(plan: Plan, rng: random.Random) -> Plan:
    one = _any_transfer(plan, rng)
    names = [name for _, name in (*plan.phase.reads, *plan.phase.writes)]
    return _transfers(plan, one, added=(one._replace(what=rng.choice(names)),))


def other_chunk(plan: Plan, rng: random.Random) -> Plan:
    one = _any_transfer(plan, rng)
    return _transfers(plan, one, added=(one._replace(chunk=rng.randrange(len(plan.layout.chunks))),))


def detour(plan: Plan, rng: random.Random) -> Plan:
    """Through a third rank, one step longer: right for results, right for inputs if they come early enough."""
    one, via = _any_transfer(plan, rng), rng.randrange(plan.ranks)
    first = one._replace(dst=via)
    if one.step > 0 and rng.random() < 0.5 and one.what in dict(plan.phase.reads).values():
        return _transfers(plan, one, added=(first._replace(step=one.step - 1), one._replace(src=via)))
    return _transfers(plan, one, added=(first, one._replace(src=via, step=one.step + 1)))


def extra_copy(plan: Plan, rng: random.Random) -> Plan:
    """An input that nobody asked for; harmless if its source has it."""
    chunk, name = rng.randrange(len(plan.layout.chunks)), rng.choice([name for _, name in plan.phase.reads])
    src = plan.layout.owner[chunk] if rng.random() < 0.7 else rng.randrange(plan.ranks)
    return _transfers(
        plan, added=(Transfer(rng.randrange(max(1, plan.steps)), src, rng.randrange(plan.ranks), name, chunk),)
    )


def later_from(plan: Plan, rng: random.Random) -> Plan:
    """Everything from some step on one step later: still right."""
    step = rng.randrange(max(1, plan.steps))
    blocks = [b._replace(step=b.step + (b.step >= step)) for b in plan.blocks]
    return replace(
        plan, blocks=tuple(blocks), transfers=tuple(t._replace(step=t.step + (t.step >= step)) for t in plan.transfers)
    )


def drop_block(plan: Plan, rng: random.Random) -> Plan:
    return _blocks(plan, _any_block(plan, rng))


def repeat_block(plan: Plan, rng: random.Random) -> Plan:
    one = _any_block(plan, rng)
    again = one._replace(rank=rng.randrange(plan.ranks), step=rng.randrange(max(1, plan.steps)))
    return replace(plan, blocks=(*plan.blocks, again))


def retime_block(plan: Plan, rng: random.Random) -> Plan:
    one = _any_block(plan, rng)
    return _blocks(plan, one, added=(one._replace(step=one.step + rng.choice([-1, 1, 1, 2])),))


def move_block(plan: Plan, rng: random.Random) -> Plan:
    one = _any_block(plan, rng)
    return _blocks(plan, one, added=(one._replace(rank=rng.randrange(plan.ranks)),))


def other_pair(plan: Plan, rng: random.Random) -> Plan:
    one, side = _any_block(plan, rng), rng.choice(["q_chunk", "kv_chunk"])
    return _blocks(plan, one, added=(one._replace(**{side: rng.randrange(len(plan.layout.chunks))}),))


def swap_blocks(plan: Plan, rng: random.Random) -> Plan:
    """Two blocks change places: right where both ranks and steps have what they need."""
    a, b = _any_block(plan, rng), _any_block(plan, rng)
    return _blocks(plan, a, b, added=tuple({a._replace(step=b.step), b._replace(step=a.step)}))


OF_BLOCKS: tuple[Change, ...] = (
    drop_block,
    repeat_block,
    retime_block,
    move_block,
    other_pair,
    swap_blocks,
    later_from,
)
CHANGES: tuple[Change, ...] = (
    drop_transfer,
    repeat_transfer,
    delay_transfer,
    redirect_transfer,
    reverse_transfer,
    rename_transfer,
    other_chunk,
    detour,
    extra_copy,
    *OF_BLOCKS,
)
