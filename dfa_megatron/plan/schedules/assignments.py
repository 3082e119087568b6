"""Assign pairs (q_chunk, kv_chunk) to ranks and steps: balanced causal work, in ring order, or in few steps.

Routes are functions from blocks to the transfers that bring inputs to readers and results to owners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import Block, Phase, Transfer, needed_pairs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.work import ROWS_PER_STEP


def balanced(mask: Mask, layout: Layout, *, share_last: bool = False) -> tuple[Block, ...]:
    """Return the blocks of DISTFLASHATTN (paper, Algorithm 2, corrected for odd P), in floor(P/2) + 1 steps.

    At step t rank r works for itself on the keys t ranks before it while there are any (r >= t), and otherwise helps
    rank r - t + P with its own keys. In the last step of an even P owners of rows compute; ranks below P/2 idle.

        P = 4     rank 0      rank 1      rank 2      rank 3      (rows of a rank, keys of a rank)
        step 0    (0, 0)      (1, 1)      (2, 2)      (3, 3)      own, causal
        step 1    (3, 0) *    (1, 0)      (2, 1)      (3, 2)      keys come from the rank before
        step 2    idle        idle        (2, 0)      (3, 1)      share_last: ranks 0 and 1 take half of each
        * helps: queries come from rank 3, and the partial result goes back.

    Args:
        mask: only causal pairs.
        layout: contiguous; halves of it to share the last step.
        share_last: for even P cut the last step's blocks in two by query rows, so that no rank idles. The owner takes
            the second half of its rows, and the otherwise idle helper the first. That step stays the last, so the
            results that travel behind no compute are half a chunk, not a whole one.
    """
    owner, ranks = layout.owner, layout.ranks
    queries = [layout.spans(rank, "q") for rank in range(ranks)]
    middle = [(spans[0].lo + spans[-1].hi) // 2 if spans else 0 for spans in queries]
    blocks: list[Block] = []
    for q, kv in needed_pairs(mask, layout.chunks):
        rows, keys = owner[q], owner[kv]
        if rows < keys:
            why = f"rows of rank {rows} see keys of rank {keys}, and it pairs causal work only"
            raise UnsupportedError("the balanced schedule on this mask", why, "schedule 'auto'")
        distance = rows - keys
        helps = 2 * distance > ranks
        if share_last and 2 * distance == ranks:
            helps = layout.chunks[q].lo < middle[rows]
        blocks.append(Block(ranks - distance, keys, q, kv) if helps else Block(distance, rows, q, kv))
    return tuple(blocks)


def by_distance(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in ring order: at step t, rank r computes its own rows against the chunks of rank r - t."""
    owner, ranks, needed = layout.owner, layout.ranks, needed_pairs(mask, layout.chunks)
    return tuple([Block((owner[q] - owner[kv]) % ranks, owner[q], q, kv) for q, kv in needed])


def by_memory(mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks in as few steps as each rank's remote work fills, for load_balanced tokens. Owners compute."""
    owned: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
    for q, kv in needed_pairs(mask, layout.chunks):
        owned[layout.owner[q]].append((q, kv))
    return assign_steps(owned, mask, layout)


def assign_steps(owned: Sequence[Sequence[tuple[int, int]]], mask: Mask, layout: Layout) -> tuple[Block, ...]:
    """Return blocks with steps: step 0 is local, help follows, then own rows, so that results travel behind them.

    Steps are as few as memory allows, near ranks before far ones, because a step is a kernel call and a wait.
    """
    owner, ranks, rows = layout.owner, layout.ranks, [len(chunk) for chunk in layout.chunks]
    limit = ROWS_PER_STEP * mask.length / ranks
    blocks: list[Block] = []
    for rank, pairs in enumerate(owned):
        steps = [[(q, kv) for q, kv in pairs if owner[q] == rank == owner[kv]]]
        help_first = [(q, kv) for q, kv in pairs if owner[q] != rank]
        own_rows = [(q, kv) for q, kv in pairs if owner[q] == rank != owner[kv]]
        for mine in (help_first, own_rows):
            mine.sort(key=lambda pair: ((rank - owner[pair[1]]) % ranks, (rank - owner[pair[0]]) % ranks, pair))
            steps += _by_memory(rank, mine, owner, rows, limit)
        blocks += [Block(step, rank, *pair) for step, mine in enumerate(steps) for pair in mine]
    return tuple(blocks)


def _by_memory(
    rank: int, pairs: Sequence[tuple[int, int]], owner: Sequence[int], rows: Sequence[int], limit: float
) -> list[list[tuple[int, int]]]:
    """Split the pairs, in order, into groups that each read at most `limit` remote rows.

    A pair that alone exceeds the limit forms its own group.
    """
    groups: list[list[tuple[int, int]]] = []
    held: set[tuple[int, int]] = set()
    read = 0
    for pair in pairs:
        needs = [(side, chunk) for side, chunk in enumerate(pair) if owner[chunk] != rank]
        more = sum(rows[chunk] for side, chunk in needs if (side, chunk) not in held)
        if not groups or read + more > limit:
            groups.append([])
            held, read, more = set(), 0, sum(rows[chunk] for _, chunk in needs)
        held.update(needs)
        read += more
        groups[-1].append(pair)
    return groups


# Routes.

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
