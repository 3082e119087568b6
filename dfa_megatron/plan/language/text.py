"""The text of a plan: people can read and edit it, `dfa-megatron plan --text` writes it, and `run --plan` runs it.

Every line is JSON. The first says what is planned; "nodes" is null unless routes know nodes of so many ranks, "queries"
unless keys are another sequence behind so many queries. Each other line is a record of a phase:

    {"schedule": "ring", "layout": "contiguous", "nodes": null, "ranks": 2, "chunks": [[first, end, rank], ...],
     "mask": {"name": ..., "length": ..., "queries": null, "tiles": [[q_lo, q_hi, kv_lo, kv_hi, lo, hi], ...]}}
    ["forward", "block", step, rank, q_chunk, kv_chunk]
    ["forward", "move", step, source, destination, name, chunk]
"""

from __future__ import annotations

import json
from typing import Any

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.ir import PHASES, AttentionPlan, Block, Plan, Transfer
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask


def to_text(plan: AttentionPlan) -> str:
    """Return the plan as text that `from_text` reads."""
    mask, layout = plan.forward.mask, plan.forward.layout
    tiles = [(t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.lo, t.hi) for t in mask.tiles]
    head = {
        "schedule": plan.schedule,
        "layout": plan.layout,
        "nodes": plan.ranks_per_node,
        "ranks": layout.ranks,
        "chunks": [(c.lo, c.hi, owner) for c, owner in zip(layout.chunks, layout.owner, strict=True)],
        "mask": {"name": mask.name, "length": mask.length, "queries": mask.queries, "tiles": tiles},
    }
    records: list[object] = [head]
    for phase in plan.phases:
        for kind, found in (("block", phase.blocks), ("move", phase.transfers)):
            records += [(phase.phase.name, kind, *record) for record in sorted(found)]
    return "".join(json.dumps(record) + "\n" for record in records)


def from_text(text: str) -> AttentionPlan:
    """Parse a plan's text; return blocks and transfers sorted. Prove the result with `check_plan`.

    Raises:
        PlanError: a line is malformed or missing; one message that names the line and the reason.
    """
    head: tuple[str, str, int | None, Mask, Layout] | None = None
    blocks, transfers = (dict[str, list[Any]]((name, []) for name in PHASES) for _ in range(2))
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
            if head is None:
                head = _head(**value)
                continue
            phase, kind, *fields = value
            record = {"block": Block, "move": Transfer}[kind](*fields)
            if any(type(x) is not (str if name == "what" else int) for name, x in record._asdict().items()):
                raise ValueError("it has numbers, and a move a name")
            (blocks if kind == "block" else transfers)[phase].append(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            shown = line if len(line) <= 60 else line[:57] + "..."
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            raise PlanError(f"line {number} of the plan's text cannot be read: {shown!r} ({reason})") from error
    if head is None or not all(blocks.values()):
        missing = [name for name, found in blocks.items() if not found]
        raise PlanError(f"the plan's text lacks blocks of phase {' and '.join(missing)}")
    schedule, by_name, nodes, mask, layout = head
    phases = {
        name: Plan(mask, layout, phase, tuple(sorted(blocks[name])), tuple(sorted(transfers[name])))
        for name, phase in PHASES.items()
    }
    return AttentionPlan(schedule, by_name, **phases, ranks_per_node=nodes)


def _head(
    *, schedule: str, layout: str, nodes: int | None, ranks: int, chunks: list[Any], mask: dict[str, Any]
) -> tuple[str, str, int | None, Mask, Layout]:
    """Return the first line's schedule, name of a layout, ranks of a node, mask and layout."""
    tiles = [Tile(Span(a, b), Span(c, d), lo, hi) for a, b, c, d, lo, hi in mask["tiles"]]
    spans, owners = [Span(lo, hi) for lo, hi, _ in chunks], [owner for *_, owner in chunks]
    length, queries = mask["length"], mask["queries"]
    numbers = [length, ranks, queries or 0, nodes or 1, *(x for row in (*chunks, *mask["tiles"]) for x in row)]
    if any(type(number) is not int for number in numbers):
        raise ValueError("lengths, tiles, chunks and ranks are integers")
    whole = Span(0, length)
    if any(t.q & whole != t.q or t.kv & whole != t.kv for t in tiles):
        raise ValueError(f"a tile is not within the {len(whole)} tokens")
    if not owners or not 0 <= min(owners) <= max(owners) < ranks:
        raise ValueError(f"a chunk is [first, end, rank], and the ranks are 0 to {ranks - 1}")
    shrunk = tuple(less for tile in tiles if (less := tile.shrink()))
    made = Mask(str(mask["name"]), length, shrunk, queries=queries)
    return schedule, layout, nodes, made, Layout(tuple(spans), tuple(owners), ranks, queries)
