"""Routes: functions from blocks to the transfers that bring inputs to readers and results to owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from dfa_megatron.plan.language.ir import Block, Phase, Transfer
from dfa_megatron.plan.language.layout import Layout

Route = Callable[[Sequence[Block], Layout, Phase], tuple[Transfer, ...]]


def direct(blocks: Sequence[Block], layout: Layout, phase: Phase) -> tuple[Transfer, ...]:
    """Send each chunk straight from its owner to its reader, one step ahead, and each result back one step late."""
    owner, out = layout.owner, list[Transfer]()
    ordered = sorted(blocks)
    far_q = [(b.rank, b.q_chunk, b.step) for b in ordered if owner[b.q_chunk] != b.rank]
    far_kv = [(b.rank, b.kv_chunk, b.step) for b in ordered if owner[b.kv_chunk] != b.rank]
    for read, write, far in ((phase.read_q, phase.write_q, far_q), (phase.read_kv, phase.write_kv, far_kv)):
        first = {(rank, chunk): step for rank, chunk, step in reversed(far)}
        out += [Transfer(step - 1, owner[chunk], rank, read, chunk) for (rank, chunk), step in first.items()]
        if write:
            last = {(rank, chunk): step for rank, chunk, step in far}
            out += [Transfer(step + 1, rank, owner[chunk], write, chunk) for (rank, chunk), step in last.items()]
    return tuple(sorted(out))


def ring_relay(blocks: Sequence[Block], layout: Layout, phase: Phase) -> tuple[Transfer, ...]:
    """Pass keys and values from rank to rank; accumulators on their side travel along and end at the owner."""
    ranks = layout.ranks
    out: list[Transfer] = []
    uses: dict[int, list[int]] = defaultdict(list)
    for block in blocks:
        if block.rank != layout.owner[block.kv_chunk]:
            uses[block.kv_chunk].append(block.step)
    for chunk, use in uses.items():
        owner, first, last = layout.owner[chunk], min(use), max(use)
        out += _hops(range(last), owner, ranks, phase.read_kv, chunk, delay=0)
        if phase.write_kv:
            out += _hops(range(first, last), owner, ranks, phase.write_kv, chunk, delay=1)
            out.append(Transfer(last + 1, (owner + last) % ranks, owner, phase.write_kv, chunk))
    return tuple(sorted(out))


def _hops(steps: Iterable[int], owner: int, ranks: int, name: str, chunk: int, delay: int) -> list[Transfer]:
    return [Transfer(s + delay, (owner + s) % ranks, (owner + s + 1) % ranks, name, chunk) for s in steps]


def gateway(transfers: Iterable[Transfer], layout: Layout, phase: Phase, ranks_per_node: int) -> tuple[Transfer, ...]:
    """Return the transfers of `direct` rerouted so that data that crosses to a node crosses once.

    Inside a node a chunk goes from reader to reader in the order of need. Partial results are merged on their way
    through the node, so that one comes back. Two readers that need a chunk in the same step both get it from its owner.
    """
    groups: dict[tuple[str, int, int], list[Transfer]] = defaultdict(list)
    out: list[Transfer] = []
    for transfer in transfers:
        away = transfer.src if transfer.what in phase.write_names else transfer.dst
        if away // ranks_per_node == layout.owner[transfer.chunk] // ranks_per_node:
            out.append(transfer)
        else:
            groups[transfer.what, transfer.chunk, away // ranks_per_node].append(transfer)
    for (what, _, _), group in groups.items():
        out += _hand_back(group) if what in phase.write_names else _hand_on(group)
    return tuple(sorted(out))


def _hand_on(reads: Sequence[Transfer]) -> Iterable[Transfer]:
    """Chain reads of one chunk by ranks of one node, by step: each comes from the latest rank that has it already."""
    holder = earlier = reads[0]
    for read in reads:
        if read.step > holder.step:
            earlier, holder = holder, read
        src = read.src if read.step == reads[0].step else earlier.dst
        yield Transfer(read.step, src, read.dst, read.what, read.chunk)


def _hand_back(results: Sequence[Transfer]) -> Iterable[Transfer]:
    """Chain partial results of one chunk from ranks of one node: each goes to the next rank, the last to the owner."""
    step = -1
    for result, following in zip_longest(results, results[1:]):
        step = max(result.step, step + 1)
        yield Transfer(step, result.src, following.src if following else result.dst, result.what, result.chunk)
