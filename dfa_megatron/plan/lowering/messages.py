"""Validate a plan's records, and group them by rank and step. Both ends of a message get the same grouping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.grid import plan_error
from dfa_megatron.plan.language.ir import Block, Plan, Transfer
from dfa_megatron.plan.language.mask import Mask

Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""(name, chunks) of each part of a message, in one order for source and destination."""


def names_joined(mask: Mask, batch: int) -> frozenset[str]:
    """Names (q, kv) that a rank receives into one buffer per step, sorted by token position, whoever sends them.

    One kernel call can then read all parts of a document, and several documents. This saves calls if the mask has
    several tiles. It needs a batch of one: the rows of a message are contiguous in the buffer for one sequence only.
    Others have statistics: a slice of rows is contiguous in (1, rows, heads, width), but not in (1, heads, rows).
    """
    return frozenset(("q", "kv")) if batch == 1 and len(mask.tiles) > 1 else frozenset()


@dataclass(slots=True)
class RankMessages:
    """Blocks and messages of one rank. incoming, outgoing: step -> peer -> parts of the message."""

    blocks: dict[int, list[Block]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[int, dict[int, Parts]] = field(default_factory=lambda: defaultdict(dict))
    outgoing: dict[int, dict[int, Parts]] = field(default_factory=lambda: defaultdict(dict))


def rank_messages(plan: Plan, batch: int) -> list[RankMessages]:
    """Return the messages of every rank, of a plan that `validate` does not refuse."""
    validate(plan)
    out = [RankMessages() for _ in range(plan.ranks)]
    for block in sorted(plan.blocks):
        out[block.rank].blocks[block.step].append(block)
    sent: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(dict)
    for step, src, dst, what, chunk in sorted(plan.transfers):
        sent[step, src, dst].setdefault(what, []).append(chunk)
    runs = _runs(plan, sent, names_joined(plan.mask, batch))
    for (step, src, dst), names in sent.items():
        parts = tuple(
            (name, chunks)
            for name, unjoined in names.items()
            for chunks in runs.get((step, src, dst, name), [tuple(unjoined)])
        )
        out[src].outgoing[step][dst] = out[dst].incoming[step][src] = parts
    return out


def _runs(
    plan: Plan, sent: dict[tuple[int, int, int], dict[str, list[int]]], joined: frozenset[str]
) -> dict[tuple[int, int, int, str], list[tuple[int, ...]]]:
    """Return (step, source, destination, joined name) -> one tuple of chunks per part that lands in adjacent rows."""
    arriving: dict[tuple[int, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for (step, src, dst), names in sent.items():
        for name, chunks in names.items():
            if name in joined:
                arriving[step, dst, name] += [(plan.layout.chunks[chunk].lo, src, chunk) for chunk in chunks]
    runs: dict[tuple[int, int, int, str], list[tuple[int, ...]]] = defaultdict(list)
    for (step, dst, name), landing in arriving.items():
        for src, run in groupby(sorted(landing), key=itemgetter(1)):
            runs[step, src, dst, name].append(tuple([chunk for _, _, chunk in run]))
    return runs


def validate(plan: Plan) -> None:
    """Refuse records that cannot run on any rank, by a PlanError that names the first, with the grid."""
    _validate_layout(plan)
    _refuse_repeats(plan)
    chunks, ranks, owner = range(len(plan.layout.chunks)), range(plan.ranks), plan.layout.owner
    results = plan.phase.write_names
    names = {name for _, name in plan.phase.reads} | set(results)
    for t in plan.transfers:
        step, src, dst, what, chunk = t
        known = src in ranks and dst in ranks and chunk in chunks and what in names
        if not known or step < 0 or src == dst:
            why = f"{t} is no transfer of a {plan.phase.name} plan on {plan.ranks} ranks"
            raise plan_error(plan, why, step, src)
        if what in results and owner[chunk] == src:
            raise plan_error(plan, f"R3: {t} takes an accumulator away from its owner", step, src)
    for b in plan.blocks:
        step, rank, q, kv = b
        if step < 0 or rank not in ranks or (q, kv) not in plan.pairs:
            known = step >= 0 and rank in ranks and q in chunks and kv in chunks
            why = "holds no pair of the mask" if known else f"is no block of a plan on {plan.ranks} ranks"
            raise plan_error(plan, f"{b} {why}", step, rank)


Carried = Mapping[Transfer, Sequence[Block]]
"""Each transfer of a result -> the blocks whose sum it is."""

SumsHeld = Mapping[tuple[int, str, int], Sequence[Block]]
"""(rank, name, chunk) of a result -> the blocks whose sum the rank has at the end."""


def carried_by(plan: Plan) -> tuple[Carried, SumsHeld]:
    """Return what every transfer of a result carries, and what the ranks end with; a rank sends only what it has."""
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
                raise plan_error(plan, f"R3: it sends {t.what} of chunk {t.chunk} that it never wrote", step, t.src)
        for block in blocks[step]:
            _, rank, q, kv = block
            held[rank, write_q, q].append(block)
            if write_kv:
                held[rank, write_kv, kv].append(block)
        for t, sum_of in zip(transfers[step], sent, strict=True):
            found[t] = sum_of
            held[t.dst, t.what, t.chunk] += sum_of
    return found, held


def _validate_layout(plan: Plan) -> None:
    length, spans = plan.mask.length, sorted([(chunk.lo, chunk.hi) for chunk in plan.layout.chunks])
    if any(end != lo or hi < lo for (_, end), (lo, hi) in pairwise([(0, 0), *spans, (length, length)])):
        raise PlanError(f"the chunks are no disjoint cover of the mask's {plan.mask.length} tokens")
    if len(plan.layout.owner) != len(plan.layout.chunks) or min(plan.layout.owner, default=0) < 0:
        raise PlanError("every chunk needs one owner")
    if plan.order is not None and plan.layout.chunks != plan.order.chunks:
        cut = sorted({*plan.layout.chunks} ^ {*plan.order.chunks})[:1]
        raise PlanError(f"the chunks are not those of the fixed order: a leaf is cut or joined, see {cut}")


def _refuse_repeats(plan: Plan) -> None:
    records: tuple[Block | Transfer, ...] = (*plan.blocks, *plan.transfers)
    if len(set(records)) < len(records):
        record = next(record for record in records if records.count(record) > 1)
        rank = record.src if isinstance(record, Transfer) else record.rank
        raise plan_error(plan, f"{record} is written twice", record.step, rank)
