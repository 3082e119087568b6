"""The measured tables of docs/hybrids.md."""

from __future__ import annotations

from collections.abc import Callable

from docs.raw_results import Lines, figures, row, table

GROUP, ONE = "11-23-2xh200-hybrid", "11-23-1xh200-recurrence"


def group() -> Lines:
    """Return a group of layers in Megatron beside its own all-to-all."""
    modes = {"Megatron's all-to-all": "te", "ours": "none", "ours, rematerialization": "remat"}
    shown = {"ms of a layer, forward and backward": "{ms_per_layer:.1f}", "GiB": "{peak_gib:.1f}"}
    return figures(
        "two GPUs, 64K tokens",
        {label: {"mode": mode} for label, mode in modes.items()},
        {head: (GROUP, {}, form) for head, form in shown.items()},
    )


def shares() -> Lines:
    """Return what a group's local work takes, and what distributing it adds, for a rank of eight."""
    found = row(ONE, ranks=8)
    parts = {
        "three gated delta nets and one attention, ms": f"{found['group, local work ms']:.0f}",
        "wider values, share of it": f"{found['wider scans, % of it']:.2f} %",
        "folds": f"{found['folds, % of it']:.2f} %",
        "exchanges, at 370 GB/s": f"{found['exchanges, % of it']:.2f} %",
        "to zigzag and back instead, at 370 GB/s": f"{found['to zigzag and back, % of it']:.2f} %",
        "heads for tokens instead, at 370 GB/s": f"{found['heads for tokens, % of it']:.2f} %",
    }
    return table(["one GPU as a rank of eight, 32K tokens each", ""], parts.items())


TABLES: dict[str, Callable[[], Lines]] = {"group": group, "shares": shares}
