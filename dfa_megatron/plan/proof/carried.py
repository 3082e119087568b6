"""Prove the pairs of a plan by its records alone, the first half of the proof, and find what each transfer carries.

A result is the sum of blocks. It starts empty wherever a block is computed, moves with its transfers, and is added to
what its destination holds. This needs no program. What it finds for a transfer is what the program of the source must
send, and what the program of the destination may rely on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NoReturn

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import Block, Plan, Transfer

Carried = Mapping[Transfer, Sequence[Block]]
"""Each transfer of a result -> the blocks whose sum it is."""


_pair_of = attrgetter("q_chunk", "kv_chunk")


def carried(plan: Plan) -> Carried:
    """Return what every transfer of a result carries, after a proof that the owners end with every needed pair once.

    Raises:
        PlanError: a result is missing, counted twice, stranded, or sent by a rank that has none.
    """
    blocks: dict[int, list[Block]] = defaultdict(list)
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for block in plan.blocks:
        blocks[block.step].append(block)
    for transfer in plan.transfers:
        if transfer.what in plan.phase.write_names:
            transfers[transfer.step].append(transfer)
    held: dict[tuple[int, str, int], list[Block]] = defaultdict(list)
    found: dict[Transfer, list[Block]] = {}
    write_q, write_kv = plan.phase.write_q, plan.phase.write_kv
    for step in range(plan.steps):
        sent = [held.pop((t.src, t.what, t.chunk), []) for t in transfers[step]]
        for t, sum_of in zip(transfers[step], sent, strict=True):
            if not sum_of:
                _fail(plan, f"R3: rank {t.src} sends {t.what} of chunk {t.chunk} that it never wrote", step, t.src)
        for block in blocks[step]:
            _, rank, q, kv = block
            held[rank, write_q, q].append(block)
            if write_kv:
                held[rank, write_kv, kv].append(block)
        for t, sum_of in zip(transfers[step], sent, strict=True):
            found[t] = sum_of
            held[t.dst, t.what, t.chunk] += sum_of
    _prove(plan, held)
    return found


def _prove(plan: Plan, held: Mapping[tuple[int, str, int], Sequence[Block]]) -> None:
    """Compare what the owners hold at the end with the pairs of the mask."""
    owner, last = plan.layout.owner, plan.steps - 1
    at_owner: dict[str, list[tuple[int, int]]] = {name: [] for name in plan.phase.write_names}
    for (rank, name, chunk), blocks in held.items():
        if blocks and owner[chunk] != rank:
            _fail(plan, f"R4: {name} of chunk {chunk} is stranded on rank {rank}", last, rank)
        at_owner[name] += map(_pair_of, blocks)
    for name, pairs in at_owner.items():
        if len(pairs) == len(plan.pairs) and plan.pairs.keys() == set(pairs):
            continue
        count = Counter(pairs)
        wrong = next(pair for pair in (*plan.pairs, *pairs) if count[pair] != 1)
        chunk = wrong[0 if name == plan.phase.write_q else 1]
        how = "counts a pair twice" if count[wrong] else "does not hold each pair of the mask exactly once"
        _fail(plan, f"R4: {name} of chunk {chunk} {how}", last, owner[chunk])


def _fail(plan: Plan, reason: str, step: int, rank: int) -> NoReturn:
    raise PlanError(f"rank {rank}, step {step}: {reason}", grid(plan, mark=(step, rank)))
