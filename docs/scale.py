"""Schedules on 8 to 512 ranks, simulated, and the pictures that need matplotlib: `python -m docs.scale`.

A plan is made once per number of ranks, schedule, route and phase, and stretched to every length and head count. The
command takes minutes, and writes scale.json and the pictures; with `pictures` it draws again what is known.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dfa_megatron.plan.cost.choose import Outline, estimate, outline
from dfa_megatron.plan.cost.hardware import H200_NIC_400G
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.schedules import OWNER_COMPUTES, SCHEDULES
from docs.measured import K, Lines, row, specification, stored, table

DOCS = Path(__file__).parent
NODE = 8
RANKS = (8, 16, 32, 64, 128, 256, 512)
LENGTHS = tuple(K * k for k in (32, 64, 128, 256, 512, 1024, 2048))
SHORTEST = 4096  # tokens per rank: the rates of shorter blocks were not measured
HEADS = {"MHA": 32, "GQA 4": 8, "GQA 8": 4}  # of 32 query heads
LINES = (("balanced_shared", False), ("balanced_shared", True), ("zigzag", False), ("zigzag", True), ("ring", False))

Row = dict[str, Any]


def rows(ranks: int, schedule: str, gateway: bool) -> list[Row]:
    """Return every length and head count of one plan; forward and backward together."""
    # Long enough that a diagonal counts as half of its block at every length.
    attention = (SCHEDULES | OWNER_COMPUTES)[schedule].plan(causal(4096 * ranks), ranks, NODE if gateway else None)
    phases = [outline(attention.forward), outline(attention.backward)]
    return [
        {"ranks": ranks, "schedule": schedule, "gateway": gateway, "heads": heads, "length": length}
        | timed(phases, Sizes(kv_heads=HEADS[heads]), length)
        for heads in HEADS
        for length in LENGTHS
        if length >= SHORTEST * ranks
    ]


def timed(outlines: Iterable[Outline], shape: Sizes, length: int) -> Row:
    """Return one point."""
    phases = [estimate(phase, shape, H200_NIC_400G, length) for phase in outlines]
    seconds = sum(phase.seconds for phase in phases)
    return {
        "ms": round(1e3 * seconds, 4),
        "idle": round(1 - sum(phase.busy for phase in phases) / seconds, 4),
        "nic_mb": round(sum(max(phase.network_bytes) for phase in phases) / 1e6, 1),
        "nvlink_mb": round(sum(max(phase.link_bytes) for phase in phases) / 1e6, 1),
    }


def best(heads: str) -> Lines:
    """Return the first schedule within 1 % of the fastest, by length and ranks, with its idle share."""
    lines, points = [], stored("scale.json")
    for length in LENGTHS:
        cells = []
        for ranks in RANKS:
            here = [r for r in points if (r["ranks"], r["length"], r["heads"]) == (ranks, length, heads)]
            one = next((r for r in here if r["ms"] <= 1.01 * min(r["ms"] for r in here)), None)
            route = ", gateway" if one and one["gateway"] else ""
            cells.append(f"`{one['schedule']}`{route} {one['ms']:.1f} ms, {100 * one['idle']:.0f} %" if one else "")
        lines.append([f"{length // K}K", *cells])
    return table(["tokens", *(f"{ranks} ranks" for ranks in RANKS)], lines)


PAGES = {"schedule-theory": {f"best-{heads.replace(' ', '-')}": partial(best, heads) for heads in HEADS}}

Curve = tuple[str, str, list[tuple[float, float]]]
"""Of a picture: its label, its style as matplotlib has it, and its points."""
Panels = list[list[tuple[str, list[Curve]]]]
"""A picture: rows of panels, each a title and curves."""


def picture(file: str, panels: Panels, ticks: dict[float, str], labels: tuple[str, str]) -> None:
    """Draw a picture without the date, so that it is the same each time."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "dfa_megatron", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    figure, axes = pyplot.subplots(
        len(panels), len(panels[0]), sharex=True, sharey="row", squeeze=False, layout="constrained",
        figsize=(10, 2 + 2 * len(panels)),
    )  # fmt: skip
    for row_of_axes, row_of_panels in zip(axes, panels, strict=True):
        for axis, (title, curves) in zip(row_of_axes, row_of_panels, strict=True):
            for label, style, points in curves:
                axis.plot(*zip(*points, strict=True), style, marker=".", label=label)
            axis.set_xscale("log", base=2)
            axis.set_xticks([*ticks], [*ticks.values()])
            axis.set(title=title, ylim=(0, None))
    figure.supxlabel(labels[0])
    figure.supylabel(labels[1])
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(DOCS / "pictures" / file, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def simulated(file: str, label: str, panels: dict[str, Callable[[str], list[Curve]]]) -> None:
    """Draw curves over the ranks: a row for each name, a column for each count of heads."""
    drawn: Panels = [[(f"{title}, {heads}", curves(heads)) for heads in HEADS] for title, curves in panels.items()]
    picture(file, drawn, {float(ranks): str(ranks) for ranks in RANKS}, ("ranks, in nodes of 8", label))


def pictures() -> None:
    """Draw the idle share and the bytes of simulated ranks, and measured rates on two GPUs."""
    points = stored("scale.json")

    def of(key: str, scale: float, line: tuple[str, bool], heads: str, length: int) -> list[tuple[float, float]]:
        here = [one for one in points if (one["heads"], one["length"]) == (heads, length)]
        return [(one["ranks"], scale * one[key]) for one in here if (one["schedule"], one["gateway"]) == line]

    def idle(schedule: str, heads: str) -> list[Curve]:
        routes = [gateway for name, gateway in LINES if name == schedule]
        return [
            (f"{length // K}K tokens{', gateway' * route}", f"C{at}{'-' if route else '--'}",
             of("idle", 100, (schedule, route), heads, length))
            for at, length in enumerate((128 * K, 512 * K, 2048 * K)) for route in routes
        ]  # fmt: skip

    def sent(key: str, heads: str) -> list[Curve]:
        return [
            (f"{schedule}{', gateway' * route}", f"C{at // 2}{'-' if route else '--'}",
             of(key, 1e-3, (schedule, route), heads, 2048 * K))
            for at, (schedule, route) in enumerate(LINES)
        ]  # fmt: skip

    simulated("scale_idle.svg", "idle, %", {one: partial(idle, one) for one in ("balanced_shared", "zigzag", "ring")})
    panels = {"adapter": partial(sent, "nic_mb"), "NVLink": partial(sent, "nvlink_mb")}
    simulated("scale_bytes.svg", "GB sent by the busiest rank", panels)
    speeds()


def speeds() -> None:
    """Draw TFLOP/s by length, of ours and others, on two GPUs."""
    file, ticks = "11-22-2xh200-peers-flash4", {float(n * K): f"{n}K" for n in (8, 32, 64, 128)}

    def rate(methods: str | list[str], kv_heads: int, length: float) -> float:
        named = [methods] if isinstance(methods, str) else methods
        where = {"heads": 32, "kv_heads": kv_heads, "seq_length": length}
        return max(float(row(file, method=one, **where)["both_tflops"]) for one in named)

    packages = specification()["lines"]["packages"].items()
    panels: Panels = [[
        (f"32 query heads on {kv_heads}",
         [(label, f"C{at}-", [(n, rate(methods, kv_heads, n)) for n in ticks])
          for at, (label, methods) in enumerate(packages) if "yunchang" not in label])
        for kv_heads in (32, 8)
    ]]  # fmt: skip
    picture("tflops_2xh200.svg", panels, ticks, ("tokens of the sequence", "TFLOP/s of a GPU, 2 H200"))


if __name__ == "__main__":
    if sys.argv[1:] != ["pictures"]:
        lines = [json.dumps(one) for ranks in RANKS for line in LINES for one in rows(ranks, *line)]
        (DOCS / "scale.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    pictures()
