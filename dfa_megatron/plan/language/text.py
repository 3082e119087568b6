"""The text of a plan: people can read and edit it, `dfa-megatron plan --text` writes it, and `run --plan` runs it.

plan balanced contiguous          the schedule, the layout, and "nodes of N" where routes know nodes
mask {"name": ..., "length": ..., "tiles": [[q_lo, q_hi, kv_lo, kv_hi, lo, hi], ...]}
                                  and "queries": N where keys are another sequence, behind N queries
ranks 2
chunks 0:16@0 16:32@1             first token, end, and the rank that holds them
phase forward
step 0
  block 0 0 0                     rank, q_chunk, kv_chunk
  move 0 1 kv 0                   source, destination, name, chunk
phase backward
...
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

from dfa_megatron.errors import PlanError
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.ir import PHASES, AttentionPlan, Block, Plan, Transfer
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask


def to_text(plan: AttentionPlan) -> str:
    """Return the plan as text that `from_text` reads."""
    mask, layout = plan.forward.mask, plan.forward.layout
    tiles = [[t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.lo, t.hi] for t in mask.tiles]
    queries = {} if mask.queries is None else {"queries": mask.queries}
    nodes = f" nodes of {plan.ranks_per_node}" if plan.ranks_per_node is not None else ""
    lines = [
        f"plan {plan.schedule} {plan.layout}{nodes}",
        "mask " + json.dumps({"name": mask.name, "length": mask.length, "tiles": tiles} | queries),
        f"ranks {layout.ranks}",
        "chunks " + " ".join(f"{c.lo}:{c.hi}@{owner}" for c, owner in zip(layout.chunks, layout.owner, strict=True)),
    ]
    for phase in plan.phases:
        lines += [f"phase {phase.phase.name}", *_steps(phase)]
    return "\n".join(lines) + "\n"


def _steps(plan: Plan) -> Iterator[str]:
    body: dict[int, list[str]] = defaultdict(list)
    for b in sorted(plan.blocks):
        body[b.step].append(f"  block {b.rank} {b.q_chunk} {b.kv_chunk}")
    for t in sorted(plan.transfers):
        body[t.step].append(f"  move {t.src} {t.dst} {t.what} {t.chunk}")
    for step in range(plan.steps):
        yield f"step {step}"
        yield from body[step]


def from_text(text: str) -> AttentionPlan:
    """Parse a plan's text; return blocks and transfers sorted. Prove the result with `check_plan`.

    Raises:
        PlanError: a line is malformed or missing; one message that names the line and the reason.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.read(line)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            shown = line if len(line) <= 60 else line[:57] + "..."
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            raise PlanError(f"line {number} of the plan's text cannot be read: {shown!r} ({reason})") from error
    return reader.plan()


class _Reader:
    """State of the parser: the lines so far."""

    def __init__(self) -> None:
        self.header: tuple[str, str, int | None] | None = None
        self.mask: Mask | None = None
        self.ranks: int | None = None
        self.layout: Layout | None = None
        self.records: dict[str, tuple[list[Block], list[Transfer]]] = {}
        self.phase, self.step = "", -1

    def read(self, line: str) -> None:
        """Parse one line; any error says what is wrong with it."""
        match line.split():
            case ["plan", schedule, layout] if self.header is None:
                self.header = schedule, layout, None
            case ["plan", schedule, layout, "nodes", "of", nodes] if self.header is None:
                self.header = schedule, layout, int(nodes)
            case ["mask", *_] if self.mask is None:
                self.mask = _mask(line)
            case ["ranks", ranks] if self.ranks is None:
                self.ranks = int(ranks)
            case ["chunks", *words] if self.layout is None and self.mask is not None and self.ranks is not None:
                self.layout = _layout(words, self.ranks, self.mask.queries)
            case ["phase", name] if name not in self.records:
                self.phase, self.step = PHASES[name].name, -1
                self.records[name] = [], []
            case ["step", number] if self.phase:
                if int(number) != self.step + 1:
                    raise ValueError(f"the next step is {self.step + 1}")
                self.step += 1
            case ["block", rank, q_chunk, kv_chunk] if self.step >= 0:
                self.records[self.phase][0].append(Block(self.step, int(rank), int(q_chunk), int(kv_chunk)))
            case ["move", src, dst, what, chunk] if self.step >= 0:
                self.records[self.phase][1].append(Transfer(self.step, int(src), int(dst), what, int(chunk)))
            case []:
                pass
            case _:
                raise ValueError("no record of a plan, one too many, or one outside a phase and step")

    def plan(self) -> AttentionPlan:
        """Return the plan of all lines."""
        if self.header is None or self.mask is None or self.layout is None:
            raise PlanError("the plan's text lacks its plan, mask or chunks line")
        if missing := PHASES.keys() - self.records.keys():
            raise PlanError(f"the plan's text lacks phase {' and '.join(sorted(missing))}")
        phases = {
            name: Plan(self.mask, self.layout, PHASES[name], tuple(sorted(blocks)), tuple(sorted(transfers)))
            for name, (blocks, transfers) in self.records.items()
        }
        schedule, layout, nodes = self.header
        return AttentionPlan(schedule, layout, **phases, ranks_per_node=nodes)


def _mask(line: str) -> Mask:
    value = json.loads(line.split(maxsplit=1)[1])
    tiles = [Tile(Span(a, b), Span(c, d), lo, hi) for a, b, c, d, lo, hi in value["tiles"]]
    numbers = [n for t in tiles for n in (t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.lo, t.hi)]
    if any(type(number) is not int for number in (value["length"], value.get("queries", 0), *numbers)):
        raise ValueError("a mask's length and tiles are integers")
    whole = Span(0, value["length"])
    if any(t.q & whole != t.q or t.kv & whole != t.kv for t in tiles):
        raise ValueError(f"a tile is not within the {len(whole)} tokens")
    shrunk = tuple(less for tile in tiles if (less := tile.shrink()))
    return Mask(str(value["name"]), value["length"], shrunk, queries=value.get("queries"))


def _layout(words: list[str], ranks: int, queries: int | None) -> Layout:
    parts = [word.split("@") for word in words]
    spans, owners = [Span(*map(int, ends.split(":"))) for ends, _ in parts], [int(owner) for _, owner in parts]
    if not owners or not 0 <= min(owners) <= max(owners) < ranks:
        raise ValueError(f"a chunk is written first:end@rank, and the ranks are 0 to {ranks - 1}")
    return Layout(tuple(spans), tuple(owners), ranks, queries)
