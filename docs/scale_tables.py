"""Schedules on 8 to 512 ranks, simulated: scale.json and the plots by `python -m docs.scale_tables`, and the tables.

The command takes minutes and needs matplotlib.
A plan is made once per number of ranks, schedule, route and phase, and stretched to every length and head count.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from dfa_megatron.plan.cost.hardware import H200_NIC_400G
from dfa_megatron.plan.cost.outline import Outline, estimate, outline
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.schedules import OWNER_COMPUTES, SCHEDULES

DOCS = Path(__file__).parent
NODE = 8
RANKS = (8, 16, 32, 64, 128, 256, 512)
LENGTHS = tuple(1024 * k for k in (32, 64, 128, 256, 512, 1024, 2048))
SHORTEST = 4096  # tokens per rank: the rates of shorter blocks were not measured
HEADS = {"MHA": 32, "GQA 4": 8, "GQA 8": 4}  # of 32 query heads
KNOWN = SCHEDULES | OWNER_COMPUTES
LINES = (("balanced_shared", False), ("balanced_shared", True), ("zigzag", False), ("zigzag", True), ("ring", False))

Row = dict[str, Any]


def plans(schedule: str, ranks: int, gateway: bool) -> AttentionPlan:
    """Both phases, long enough that a diagonal counts as half of its block at every length."""
    return KNOWN[schedule].plan(causal(4096 * ranks), ranks, NODE if gateway else None)


def rows(ranks: int, schedule: str, gateway: bool) -> list[Row]:
    """Every length and head count of one plan; forward and backward together."""
    attention = plans(schedule, ranks, gateway)
    forward, backward = outline(attention.forward), outline(attention.backward)
    return [
        timed(forward, backward, schedule, gateway, heads, length)
        for heads in HEADS
        for length in LENGTHS
        if length >= SHORTEST * ranks
    ]


def timed(forward: Outline, backward: Outline, schedule: str, gateway: bool, heads: str, length: int) -> Row:
    """One point of the plots."""
    shape = AttentionShape(kv_heads=HEADS[heads])
    phases = [estimate(phase, shape, H200_NIC_400G, length) for phase in (forward, backward)]
    seconds = sum(phase.seconds for phase in phases)
    idle = 1 - sum(phase.busy for phase in phases) / seconds
    return {
        "ranks": forward.ranks,
        "schedule": schedule,
        "gateway": gateway,
        "heads": heads,
        "length": length,
        "ms": round(1e3 * seconds, 4),
        "idle": round(idle, 4),
        "nic_mb": round(sum(max(phase.network_bytes) for phase in phases) / 1e6, 1),
        "nvlink_mb": round(sum(max(phase.link_bytes) for phase in phases) / 1e6, 1),
    }


def name(schedule: str, gateway: bool) -> str:
    """A line of the plots."""
    return f"`{schedule}`, gateway" if gateway else f"`{schedule}`"


def best(heads: str, ranks: tuple[int, ...] = RANKS, lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    """Return the first line within 1 % of the fastest, by length and ranks, with its idle share."""
    results = json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))
    lines = ["| tokens | " + " | ".join(f"{count} ranks" for count in ranks) + " |", "|---" * (1 + len(ranks)) + "|"]
    for length in lengths:
        cells = []
        for count in ranks:
            here = [r for r in results if (r["ranks"], r["length"], r["heads"]) == (count, length, heads)]
            taken = next((r for r in here if r["ms"] <= 1.01 * min(r["ms"] for r in here)), None)
            cells.append(
                f"{name(taken['schedule'], taken['gateway'])} {taken['ms']:.1f} ms, {100 * taken['idle']:.0f} %"
                if taken
                else ""
            )
        lines.append(f"| {length // 1024}K | " + " | ".join(cells) + " |")
    return lines


def plot(results: list[Row]) -> None:
    """The pictures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "scale", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    _plot_idle(results)
    _plot_bytes(results)


def _plot_idle(results: list[Row]) -> None:
    from matplotlib import pyplot

    schedules, lengths = ("balanced_shared", "zigzag", "ring"), (131072, 524288, 2097152)
    figure, axes = pyplot.subplots(3, 3, figsize=(10, 8), sharex=True, sharey=True, layout="constrained")
    for row, schedule in enumerate(schedules):
        for column, heads in enumerate(HEADS):
            axis = axes[row][column]
            for colour, length in enumerate(lengths):
                for gateway in (True, False):
                    here = [
                        r
                        for r in results
                        if (r["schedule"], r["heads"], r["length"], r["gateway"]) == (schedule, heads, length, gateway)
                    ]
                    if here:
                        label = f"{length // 1024}K tokens" if gateway or schedule == "ring" else None
                        style = "-" if gateway or schedule == "ring" else "--"
                        axis.plot(
                            [r["ranks"] for r in here], [100 * r["idle"] for r in here], style, color=f"C{colour}",
                            marker=".", label=label,
                        )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
            axis.set_title(f"{schedule}, {heads}")
    for axis in axes[-1]:
        axis.set_xlabel("ranks, in nodes of 8")
    for axis in axes[:, 0]:
        axis.set_ylabel("idle, %")
    axes[1][2].legend()
    save(figure, "scale_idle.svg")


def _plot_bytes(results: list[Row]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5.5), sharex=True, sharey="row", layout="constrained")
    for row, (key, title) in enumerate((("nic_mb", "adapter"), ("nvlink_mb", "NVLink"))):
        for column, heads in enumerate(HEADS):
            axis = axes[row][column]
            for schedule, gateway in LINES:
                here = [
                    r
                    for r in results
                    if (r["schedule"], r["heads"], r["length"], r["gateway"]) == (schedule, heads, 2097152, gateway)
                ]
                colour = {"balanced_shared": "C0", "zigzag": "C1", "ring": "C2"}[schedule]
                label = schedule + (", gateway" if gateway else "")
                axis.plot(
                    [r["ranks"] for r in here], [r[key] / 1e3 for r in here], "-" if gateway else "--", color=colour,
                    marker=".", label=label,
                )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
            axis.set_title(f"{title}, {heads}")
    for axis in axes[-1]:
        axis.set_xlabel("ranks, in nodes of 8")
    for axis in axes[:, 0]:
        axis.set_ylabel("GB sent by the busiest rank")
    axes[0][2].legend()
    save(figure, "scale_bytes.svg")


def save(figure: Any, file: str) -> None:
    """Write a picture without the date, so that it is the same each time."""
    figure.savefig(DOCS / "pictures" / file, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Compute, plot and write."""
    results: list[Row] = []
    for ranks in RANKS:
        for schedule, gateway in LINES:
            start = time.perf_counter()
            results += rows(ranks, schedule, gateway)
            print(f"{ranks} ranks, {schedule}, gateway {gateway}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    lines = ",\n".join(json.dumps(row) for row in results)
    (DOCS / "scale.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    plot(results)


TABLES = {f"best-{heads.replace(' ', '-')}": partial(best, heads) for heads in HEADS}

if __name__ == "__main__":
    main()
