"""Plot a benchmark: TFLOP/s by length, a line per method, a panel per attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attention.report import Row, short

logger = logging.getLogger(__name__)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Write the picture; return False if there is nothing to draw or matplotlib is missing."""
    timed = [row for row in rows if row.state == "timed"]
    if not timed:
        return False
    try:
        import matplotlib
    except ImportError:
        logger.warning("no picture: matplotlib is not installed")
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in timed))
    size = (3 + 4 * len(shapes), 5)
    figure, panels = pyplot.subplots(1, len(shapes), figsize=size, sharey=True, squeeze=False, layout="constrained")
    names = list(dict.fromkeys(row.method for row in timed))
    spectrum = matplotlib.colormaps["turbo"].resampled(max(2, len(names)))
    colours = {name: spectrum(number) for number, name in enumerate(names)}
    for shape, panel in zip(shapes, panels[0], strict=True):
        for name in names:
            mine = [row for row in timed if row.shape == shape and row.method == name]
            if mine:
                speeds = [row.both_tflops or row.forward_tflops for row in mine]
                style = "-o" if mine[0].kind == "ours" else "--x"
                panel.plot([row.seq_length for row in mine], speeds, style, color=colours[name], label=name)
        lengths = sorted({row.seq_length for row in timed if row.shape == shape})
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [short(length) for length in lengths])
        panel.set_title(f"{shape[0]} heads, {shape[1]} kv_heads, {shape[3]}")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("TFLOP/s per rank, forward and backward")
    panels[0][0].set_ylim(bottom=0)
    handles = dict(
        pair for panel in panels[0] for pair in zip(*reversed(panel.get_legend_handles_labels()), strict=True)
    )
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
