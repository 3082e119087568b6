"""A second reading of the plan language, from its rules alone: plans run in float64 over dictionaries of chunks.

It shares nothing with lowering, programs, the interpreter and the checker, so that they can be tested against it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dfa_megatron.plan.language.ir import Block, Plan, Transfer
from tests.support import plan_dense as dense
from tests.support.plan_dense import Reference


class WrongPlanError(Exception):
    """The plan cannot be run by the rules."""


def is_right(plan: Plan, sees: np.ndarray, reference: Reference) -> bool:
    """The plan is of the language, and what it computes is attention."""
    try:
        _speaks(plan, sees)
        held = _run(plan, sees, reference)
    except WrongPlanError:
        return False
    return _compare(plan, held, reference)


def _speaks(plan: Plan, sees: np.ndarray) -> None:
    """Nothing is written twice, every record names what exists, and no accumulator leaves its owner."""
    chunks, ranks = len(plan.layout.chunks), max(plan.layout.owner) + 1
    reads, writes = {plan.phase.read_q, plan.phase.read_kv}, {plan.phase.write_q, plan.phase.write_kv} - {""}
    if len(set(plan.blocks)) < len(plan.blocks) or len(set(plan.transfers)) < len(plan.transfers):
        raise WrongPlanError("repeated")
    for t in plan.transfers:
        exists = 0 <= t.src < ranks and 0 <= t.dst < ranks and 0 <= t.chunk < chunks and t.what in reads | writes
        if not exists or t.step < 0 or t.src == t.dst:
            raise WrongPlanError(t)
        if t.what in writes and plan.layout.owner[t.chunk] == t.src:
            raise WrongPlanError(t)
    for b in plan.blocks:
        if b.step < 0 or not (0 <= b.rank < ranks and 0 <= b.q_chunk < chunks and 0 <= b.kv_chunk < chunks):
            raise WrongPlanError(b)
        if not _pairs(plan, b, sees).any():
            raise WrongPlanError(b)


def _pairs(plan: Plan, block: Block, sees: np.ndarray) -> np.ndarray:
    q, kv = plan.layout.chunks[block.q_chunk], plan.layout.chunks[block.kv_chunk]
    return sees[q.lo : q.hi, kv.lo : kv.hi]


Held = dict[tuple[int, str, int], np.ndarray]
"""(rank, name, chunk) -> value."""


def _run(plan: Plan, sees: np.ndarray, reference: Reference) -> Held:
    phase, layout = plan.phase, plan.layout
    inputs: Held = {}
    for chunk, home in enumerate(layout.owner):
        span = layout.chunks[chunk]
        for name in (phase.read_q, phase.read_kv):
            inputs[home, name, chunk] = reference.rows(name)[span.lo : span.hi]
    sums: Held = {}
    blocks: dict[int, list[Block]] = defaultdict(list)
    moves: dict[int, list[Transfer]] = defaultdict(list)
    for b in plan.blocks:
        blocks[b.step].append(b)
    for t in plan.transfers:
        moves[t.step].append(t)
    for step in range(1 + max([*blocks, *moves], default=-1)):
        wire = [(t, _leave(t, phase.write_q, phase.write_kv, inputs, sums)) for t in moves[step]]
        for b in blocks[step]:
            _compute(plan, b, sees, inputs, sums)
        for t, value in wire:
            if t.what in (phase.write_q, phase.write_kv):
                _add(sums, (t.dst, t.what, t.chunk), value)
            else:
                inputs[t.dst, t.what, t.chunk] = value
    return sums


def _leave(t: Transfer, write_q: str, write_kv: str, inputs: Held, sums: Held) -> np.ndarray:
    key = (t.src, t.what, t.chunk)
    moves_away = t.what in (write_q, write_kv)
    if key not in (sums if moves_away else inputs):
        raise WrongPlanError(t)
    return sums.pop(key) if moves_away else inputs[key]


def _compute(plan: Plan, b: Block, sees: np.ndarray, inputs: Held, sums: Held) -> None:
    q, kv = (b.rank, plan.phase.read_q, b.q_chunk), (b.rank, plan.phase.read_kv, b.kv_chunk)
    if q not in inputs or kv not in inputs:
        raise WrongPlanError(b)
    pairs = _pairs(plan, b, sees)
    if plan.phase.name == "forward":
        _add(sums, (b.rank, "out", b.q_chunk), dense.forward(inputs[q], inputs[kv], pairs))
    else:
        dq, dkv = dense.backward(inputs[q], inputs[kv], pairs)
        _add(sums, (b.rank, "dq", b.q_chunk), dq)
        _add(sums, (b.rank, "dkv", b.kv_chunk), dkv)


def _add(sums: Held, key: tuple[int, str, int], value: np.ndarray) -> None:
    if key not in sums:
        sums[key] = value
    elif key[1] == "out":
        sums[key] = dense.merge(sums[key], value)
    else:
        sums[key] = sums[key] + value


def _compare(plan: Plan, held: Held, reference: Reference) -> bool:
    if any(plan.layout.owner[chunk] != rank for rank, _, chunk in held):
        return False
    for name in {plan.phase.write_q, plan.phase.write_kv} - {""}:
        want = reference.rows(name)
        got = np.zeros_like(want)
        if name == "out":
            got[:, -1] = -np.inf
        for (_, held_name, chunk), value in held.items():
            if held_name == name:
                span = plan.layout.chunks[chunk]
                got[span.lo : span.hi] = value
        if not np.allclose(got, want, rtol=1e-9, atol=1e-9):
            return False
    return True
