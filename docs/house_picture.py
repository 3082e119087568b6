"""The house of architecture.md, drawn from the imports of every module.

A box is a folder of the package with the rooms inside, or a module beside the folders. A box stands above
everything that it imports. An arrow that follows from two others is left out.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dfa_megatron"
PICTURE = Path(__file__).with_name("pictures") / "house.svg"
GROUND = {"errors", "names", "config"}
"""Imported by all: drawn as the floor, without arrows."""
LEFT_OUT = {"launch", "step_log", ""}
COLOURS = {"plan": "#efe7fd", "kernels": "#fde8ef", "runtime": "#fff1da", "attention": "#e2f5e9"}
WIDTH, GAP, LINE, EDGE = 960, 40, 18, 14


@cache
def modules() -> frozenset[str]:
    """Return the dotted names of all modules, without the package's own name."""
    paths = (path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py"))
    return frozenset(".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in paths)


def box(module: str) -> str:
    """Return the box of a module: `plan.language.ir` stands in `plan`."""
    return module.split(".")[0]


def imports() -> dict[str, set[str]]:
    """Return for every box the boxes whose names its modules import."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        here = box(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        targets = found.setdefault(here, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("dfa_megatron"):
                continue
            base = (node.module or "").removeprefix("dfa_megatron").strip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".strip(".")
                targets.add(box(name if name in modules() else base))
    hidden = GROUND | LEFT_OUT
    return {here: targets - hidden - {here} for here, targets in found.items() if here not in hidden}


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows without those that follow from two others."""

    def below(start: str) -> set[str]:
        return {start}.union(*(below(target) for target in arrows[start]))

    return {
        here: {t for t in targets if not any(t in below(other) for other in targets - {t})}
        for here, targets in arrows.items()
    }


def layers(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the boxes from the top row to the ground: each box just below the lowest box that imports it."""

    @cache
    def depth(here: str) -> int:
        return max((depth(other) + 1 for other, targets in arrows.items() if here in targets), default=0)

    rows: list[list[str]] = [[] for _ in range(max(map(depth, arrows)) + 1)]
    for here in sorted(arrows):
        rows[depth(here)].append(here)
    return rows


def rooms(name: str) -> list[str]:
    """Return the folders inside of a box."""
    return sorted(path.parent.name + "/" for path in (PACKAGE / name).glob("*/__init__.py"))


def picture() -> str:
    """Return the house as SVG."""
    arrows = reduced(imports())
    places, shapes, top = dict[str, tuple[float, float, float, float]](), list[str](), float(EDGE)
    for row in layers(arrows):
        needed = {name: 24 + max(9 * len(name) + 34, 7.4 * len("  ".join(rooms(name)))) for name in row}
        spare, left = (WIDTH - EDGE * (len(row) + 1) - sum(needed.values())) / len(row), float(EDGE)
        tall = 34 + LINE * any(map(rooms, row))
        for name in row:
            wide = needed[name] + spare
            places[name] = left, top, wide, tall
            shapes += _box(name, places[name])
            left += wide + EDGE
        top += tall + GAP
    lines = [_arrow(places[here], places[target]) for here in arrows for target in sorted(arrows[here])]
    floor = f"{', '.join(f'{name}.py' for name in sorted(GROUND))}: imported by all, import nothing above them"
    shapes.append(f'<text x="{EDGE}" y="{top - GAP + 26:.0f}" class="m">{floor}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - GAP + 42:.0f}" font-family="monospace">\n'
        "<style>text{fill:#1b1f24}.t{font:700 15px sans-serif}.m{font-size:12px}"
        ".l{stroke:#57606a;stroke-width:1.5}</style>\n"
        '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>\n<rect width="100%" height="100%" fill="#fff"/>\n'
    )
    return head + "\n".join([*lines, *shapes]) + "\n</svg>\n"


def _box(name: str, place: tuple[float, float, float, float]) -> list[str]:
    left, top, wide, tall = place
    title = f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"
    return [
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{tall:.0f}" rx="7" '
        f'fill="{COLOURS.get(name, "#eaf1fd")}" stroke="#57606a"/>',
        f'<text x="{left + 12:.0f}" y="{top + 22:.0f}" class="t">{title}</text>',
        f'<text x="{left + 12:.0f}" y="{top + 22 + LINE:.0f}" class="m">{"  ".join(rooms(name))}</text>',
    ]


def _arrow(here: tuple[float, float, float, float], there: tuple[float, float, float, float]) -> str:
    start = here[0] + here[2] / 2
    end = min(max(start, there[0] + 20), there[0] + there[2] - 20)
    y1, y2 = here[1] + here[3], there[1] - 1
    return f'<path class="l" d="M{start:.0f} {y1:.0f}L{end:.0f} {y2:.0f}" marker-end="url(#m)"/>'
