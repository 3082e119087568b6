"""A rank's share of a plan: its blocks and its messages, step by step; grouped once for all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dfa_megatron.plan.ir import Block, Plan

Cargo = Mapping[str, tuple[int, ...]]
"""What one message carries: name -> chunks, both sorted, so that source and destination agree on the order."""


@dataclass(slots=True)
class Share:
    """What a plan says about one rank. incoming, outgoing: step -> peer -> cargo, sorted."""

    blocks: dict[int, list[Block]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[int, dict[int, Cargo]] = field(default_factory=lambda: defaultdict(dict))
    outgoing: dict[int, dict[int, Cargo]] = field(default_factory=lambda: defaultdict(dict))


def shares(plan: Plan) -> list[Share]:
    """The share of every rank; the plan's records must name ranks that exist."""
    out = [Share() for _ in range(plan.ranks)]
    for block in sorted(plan.blocks):
        out[block.rank].blocks[block.step].append(block)
    cargos: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(dict)
    for t in sorted(plan.transfers):  # by step, source, destination, name and chunk
        cargos[t.step, t.src, t.dst].setdefault(t.what, []).append(t.chunk)
    for (step, src, dst), names in cargos.items():
        cargo = {name: tuple(chunks) for name, chunks in names.items()}
        out[src].outgoing[step][dst] = out[dst].incoming[step][src] = cargo
    return out
