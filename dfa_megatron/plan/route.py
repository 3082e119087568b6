"""How data reach the blocks that read them and results come home: a route is a function from blocks to transfers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dfa_megatron.plan.ir import Block, Phase, Transfer, chunk_of
from dfa_megatron.plan.layout import Layout


def direct(blocks: Sequence[Block], layout: Layout, phase: Phase) -> tuple[Transfer, ...]:
    """Each chunk goes straight from its home to its reader, one step ahead; each result goes home one step late."""
    out: set[Transfer] = set()
    held: set[tuple[int, str, int]] = set()
    for block in sorted(blocks):
        for side, name in phase.reads:
            chunk = chunk_of(block, side)
            if layout.home[chunk] != block.rank and (block.rank, name, chunk) not in held:
                held.add((block.rank, name, chunk))
                out.add(Transfer(block.step - 1, layout.home[chunk], block.rank, name, chunk))
    last: dict[tuple[int, str, int], int] = {}
    for block in blocks:
        for side, name in phase.writes:
            chunk = chunk_of(block, side)
            if layout.home[chunk] != block.rank:
                key = (block.rank, name, chunk)
                last[key] = max(last.get(key, 0), block.step)
    out |= {Transfer(step + 1, rank, layout.home[chunk], name, chunk) for (rank, name, chunk), step in last.items()}
    return tuple(sorted(out))


def ring_relay(blocks: Sequence[Block], layout: Layout, phase: Phase) -> tuple[Transfer, ...]:
    """Keys and values hop from rank to rank; what accumulates on their side hops along and ends at home."""
    ranks = layout.ranks
    out: list[Transfer] = []
    for chunk, home in enumerate(layout.home):
        use = [block.step for block in blocks if block.kv_chunk == chunk and block.rank != home]
        if not use:
            continue
        first, last = min(use), max(use)
        out += _hops(range(last), home, ranks, phase.read_kv, chunk, delay=0)
        if phase.write_kv:
            out += _hops(range(first, last), home, ranks, phase.write_kv, chunk, delay=1)
            out.append(Transfer(last + 1, (home + last) % ranks, home, phase.write_kv, chunk))
    return tuple(sorted(out))


def _hops(steps: Iterable[int], home: int, ranks: int, name: str, chunk: int, delay: int) -> list[Transfer]:
    return [Transfer(s + delay, (home + s) % ranks, (home + s + 1) % ranks, name, chunk) for s in steps]
