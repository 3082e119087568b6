"""The measured tables of docs/hybrids.md."""

from __future__ import annotations

from collections.abc import Callable

from docs.raw_results import Lines, figures, row, table

GROUP, ONE = "11-28-2xh100-hybrid", "11-23-1xh200-recurrence"


def group() -> Lines:
    """Return a group of layers in Megatron beside its own all-to-all."""
    modes = {"Megatron's all-to-all": "te", "ours": "none", "ours, rematerialization": "remat"}
    return figures(
        "two H100, 64K tokens: ms of a layer, forward and backward",
        {label: {"mode": mode} for label, mode in modes.items()},
        {
            "NVLink": (GROUP, {}, "{ms_per_layer:.1f}"),
            "sockets": (f"{GROUP}-two-hosts", {}, "{ms_per_layer:.1f}"),
            "GiB": (GROUP, {}, "{peak_gib:.1f}"),
        },
    )


def shares() -> Lines:
    """Return what a group's local work takes, and what distributing it adds, for a rank of two, four and eight."""
    ranks = [row(ONE, ranks=number) for number in (2, 4, 8)]
    parts = {
        "three gated delta nets and one attention, ms": "{group, local work ms:.0f}",
        "wider values, share of it": "{wider scans, % of it:.1f} %",
        "folds and exchanges": "{added:.2f} %",
        "to zigzag and back instead": "{to zigzag and back, % of it:.1f} %",
        "heads for tokens instead": "{heads for tokens, % of it:.1f} %",
    }
    for one in ranks:
        one["added"] = one["folds, % of it"] + one["exchanges, % of it"]
    lines = [[label, *(form.format_map(one) for one in ranks)] for label, form in parts.items()]
    return table(["one GPU as a rank, 32K tokens, a link of 370 GB/s", "of 2", "of 4", "of 8"], lines)


TABLES: dict[str, Callable[[], Lines]] = {
    "group": group,
    "shares": shares,
}
