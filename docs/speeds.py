"""The picture of rates on two GPUs: `python -m docs.speeds`. benchmarks/long_run.py drew 11-30-2xcpu-long-run."""

from __future__ import annotations

from docs.measured import DOCS, K, row, specification

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
    speeds()
