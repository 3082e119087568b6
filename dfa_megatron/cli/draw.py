"""Draw plans: the grid as text, or as SVG a row per rank over simulated time, with the messages that arrive."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import Event, Timeline, simulate
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.language.grid import grid, whose
from dfa_megatron.plan.language.ir import PHASES, AttentionPlan, Block, Plan
from dfa_megatron.plan.language.sizes import Sizes

WIDTH, LEFT, RIGHT = 1120, 76, 148
HEADER, HEADING, FOOTER = 62, 44, 46
COMPUTE, LANE, GAP, AXIS = 28, 11, 9, 30
PLOT = WIDTH - LEFT - RIGHT

STYLE = """
  text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 12px }
  .card { fill: #ffffff; stroke: #d0d7de }
  .ink { fill: #1f2328 }
  .muted { fill: #59636e }
  .title { font-size: 17px; font-weight: 600 }
  .heading { font-size: 13px; font-weight: 600 }
  .small { font-size: 10.5px }
  .line { stroke: #8b949e; stroke-opacity: 0.35 }
  .idle { fill: url(#hatch) }
  .hatch { stroke: #8b949e; stroke-opacity: 0.45 }
  .diagonal { fill: #2f5d9e }
  .own { fill: #79abe0 }
  .helper { fill: #f0a04b }
  .merge { fill: #8b949e }
  .kv { fill: #3d9a63 }
  .q { fill: #9a6bc4 }
  .result { fill: #cf5b5b }
  .on-dark { fill: #ffffff }
  .on-light { fill: #14202e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }
    .ink { fill: #e6edf3 }
    .muted { fill: #9198a1 }
  }
"""

LEGEND = (
    ("diagonal", "own rows, diagonal"),
    ("own", "own rows"),
    ("helper", "helping another rank"),
    ("idle", "idle"),
    ("kv", "keys, values arrive"),
    ("q", "queries arrive"),
    ("result", "results arrive"),
)

ARRIVES = {"kv": "kv", "q": "q", "qdo": "q", "out": "result", "dq": "result", "dkv": "result"}


def picture(title: str, subtitle: str, timelines: Sequence[tuple[Plan, Timeline]]) -> str:
    """Return an SVG of the phases, one below the other, each over its own time; it follows a viewer's dark mode."""
    out: list[str] = []
    top = HEADER
    for plan, timeline in timelines:
        _panel(out, plan, timeline, top)
        top += _height(plan)
    _legend(out, [entry for entry in LEGEND if any(f'class="{entry[0]}"' in line for line in out)], top + 4)
    height = top + FOOTER
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="7" stroke-width="1.6"/></pattern></defs>',
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        _text(20, 31, title, "ink title"),
        _text(20, 50, f"simulated: {subtitle}", "muted"),
    ]
    return "\n".join([*head, *out, "</svg>"]) + "\n"


def _height(plan: Plan) -> int:
    return HEADING + plan.ranks * (COMPUTE + LANE + GAP) + AXIS


def _panel(out: list[str], plan: Plan, timeline: Timeline, top: int) -> None:
    """Draw one phase: heading, step marks, a row per rank, the axis."""
    span = timeline.makespan or 1.0
    rows = top + HEADING
    bottom = rows + plan.ranks * (COMPUTE + LANE + GAP)

    def x(seconds: float) -> float:
        return LEFT + PLOT * seconds / span

    heading = f"{plan.phase.name}: {_shown(timeline.makespan, SECONDS)}, idle {100 * timeline.idle_share:.1f} %"
    out.append(_text(20, top + 14, heading, "ink heading"))
    out.append(_text(WIDTH - 20, top + 30, "sent | received", "muted small", "end"))
    for step, start in _step_starts(timeline):
        out.append(f'<path class="line" d="M{x(start):.1f} {rows - 8}V{bottom}" stroke-dasharray="3 3"/>')
        out.append(_text(x(start) + 3, rows - 6, f"step {step}", "muted small"))
    for rank in range(plan.ranks):
        y = rows + rank * (COMPUTE + LANE + GAP)
        out.append(_text(20, y + COMPUTE / 2 + 4, f"rank {rank}", "ink"))
        out.append(_box("idle", LEFT, y, PLOT, COMPUTE, 3))
        moved = " | ".join(_shown(of[rank], BYTES) for of in (timeline.sent, timeline.received))
        out.append(_text(WIDTH - 20, y + COMPUTE / 2 + 4, moved, "muted", "end"))
        for event in timeline.events:
            if event.rank == rank and event.kind == "compute":
                _cell(out, plan, event, x(event.start), x(event.end), y)
        arrivals = sorted((e for e in timeline.events if e.rank == rank and e.kind == "receive"), key=lambda e: e.start)
        for event in arrivals:
            _arrival(out, event, x(event.start), x(event.end), y + COMPUTE + 1)
        _name_arrivals(out, [(x(e.start), x(e.end), f"{e.label} ← {e.peer}") for e in arrivals], y + COMPUTE)
    for tick in range(6):
        seconds = timeline.makespan * tick / 5
        anchor = "start" if tick == 0 else "end" if tick == 5 else "middle"
        out.append(_text(x(seconds), bottom + 10, _shown(seconds, SECONDS), "muted small", anchor))


def _step_starts(timeline: Timeline) -> list[tuple[int, float]]:
    starts: dict[int, float] = {}
    for event in timeline.events:
        if event.kind == "compute" and event.blocks:
            starts[event.step] = min(starts.get(event.step, event.start), event.start)
    return sorted(starts.items())


def _cell(out: list[str], plan: Plan, event: Event, left: float, right: float, y: float) -> None:
    width = max(right - left, 0.6)
    kind = _kind(plan, event.blocks)
    rows, keys = (block.q_chunk for block in event.blocks), (block.kv_chunk for block in event.blocks)
    label = f"q{whose(plan, rows)} · k{whose(plan, keys)}" if event.blocks else event.label
    note = f"rank {event.rank}, step {event.step}: {label}, {_shown(event.end - event.start, SECONDS)}"
    out.append(_box(kind, left + 0.5, y, max(width - 1, 0.6), COMPUTE, min(3, width / 3), note))
    for text in (label, label.replace(" ", ""), label.split(" ")[0]):
        if event.blocks and 6.8 * len(text) < width - 2:
            on = "on-dark" if kind == "diagonal" else "on-light"
            out.append(_text((left + right) / 2, y + COMPUTE / 2 + 4, text, on, "middle"))
            break


def _kind(plan: Plan, blocks: Sequence[Block]) -> str:
    owner = plan.layout.owner
    if not blocks:
        return "merge"
    if any(owner[block.q_chunk] != block.rank for block in blocks):
        return "helper"
    return "diagonal" if all(owner[block.kv_chunk] == block.rank for block in blocks) else "own"


def _arrival(out: list[str], event: Event, left: float, right: float, y: float) -> None:
    """Draw a message as a bar with a stripe for each name in it."""
    names = event.label.split("+")
    height, width = (LANE - 2) / len(names), max(right - left, 1.2)
    took = f"{_shown(event.nbytes, BYTES)}, {_shown(event.end - event.start, SECONDS)}"
    note = f"{event.label} from rank {event.peer}, step {event.step}, {took}"
    for place, name in enumerate(names):
        out.append(_box(ARRIVES[name], left, y + place * height, width, height, 1, note))


def _name_arrivals(out: list[str], bars: Sequence[tuple[float, float, str]], y: float) -> None:
    """Write the names of arrivals behind their bars; bars that are too close share one place."""
    names: list[str] = []
    for (_, right, name), following in zip(bars, [*(bar[0] for bar in bars[1:]), WIDTH - RIGHT], strict=False):
        names.append(name)
        text = ", ".join(names)
        if right + 4 + 6.0 * len(text) < following:
            out.append(_text(right + 4, y + LANE - 1.5, text, "muted small"))
            names = []
        elif following - right > 24:
            names = []


def _legend(out: list[str], entries: Sequence[tuple[str, str]], y: float) -> None:
    x = 20.0
    for kind, text in entries:
        top, height = (y, 14) if kind in ("diagonal", "own", "helper", "idle") else (y + 3, 8)
        out.append(_box(kind, x, top, 16, height, 2))
        out.append(_text(x + 22, y + 11.5, text, "ink"))
        x += 22 + 6.4 * len(text) + 20


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}"' + ("" if anchor == "start" else f' text-anchor="{anchor}"')
    return f'<text class="{kind}" {where}>{escape(text)}</text>'


def _box(kind: str, x: float, y: float, width: float, height: float, radius: float, note: str = "") -> str:
    """Return a rectangle with rounded corners, and a note that a pointer shows."""
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:.0f}"'
    return f'<rect class="{kind}" {where}' + (f"><title>{escape(note)}</title></rect>" if note else "/>")


SECONDS = ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)
BYTES = ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)
"""Units with their sizes, the largest first."""


def _shown(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a number in the largest unit of which it has one or more."""
    unit, size = next((one for one in units if value >= one[1]), units[-1])
    return f"{value / size:.3g} {unit}" if value else "0"


Style = Literal["text", "svg"]


def draw(
    plan: AttentionPlan | Plan,
    style: Style = "text",
    *,
    phase: Literal["forward", "backward", "both"] = "both",
    sizes: Sizes | None = None,
    hardware: Hardware = H200_NVLINK,
    width: int = 100,
) -> str:
    """Draw a plan.

    Args:
        plan: both phases, or one.
        style: "text" is a row per step and a column per rank; "svg" a row per rank over simulated time.
        phase: which phases of an AttentionPlan.
        sizes, hardware: what "svg" simulates.
        width: of the text, in characters; more ranks than fit merge into bands.

    Raises:
        UnsupportedError: an unknown style or phase.
        PlanError: "svg" of a plan that breaks a rule of the language.
    """
    if phase not in ("both", *PHASES):
        raise UnsupportedError(f"phase {phase!r}", "there is no such phase", "one of both, " + ", ".join(PHASES))
    phases = [one for one in plan.phases if isinstance(plan, Plan) or phase in ("both", one.phase.name)]
    if style == "text":
        return "\n\n".join(grid(one, width=width) for one in phases)
    if style != "svg":
        raise UnsupportedError(f"style {style!r}", "there is no such style", "one of text, svg")
    sizes = sizes or Sizes()
    name = f"{plan.schedule} schedule, " if isinstance(plan, AttentionPlan) else ""
    mask = phases[0].mask
    title = f"{name}{mask.name} mask, {mask.length:,} tokens, {plan.ranks} ranks"
    timelines = [(one, simulate(one, sizes, hardware)) for one in phases]
    heads = f"{sizes.heads} heads, {sizes.kv_heads} kv heads of {sizes.head_dim}"
    return picture(title, f"{heads}, {hardware.name}", timelines)
