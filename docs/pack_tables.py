"""The tables of packed documents."""

from __future__ import annotations

import functools
import json

from docs.dynamic_cp_table import dynamic_cp
from docs.raw_results import RESULTS, Lines, bold, figures, row, table


def packed() -> Lines:
    """Return packed documents on two and four GPUs."""
    methods = {
        "ours, `greedy`": "dfa greedy auto auto",
        "ours, `auto`": "dfa auto auto auto",
        "ours, layout `load_balanced`": "dfa dealt auto auto",
        **{f"ring-flash-attn, `{name}`": f"ring-flash-attn {name} varlen" for name in ("llama3", "ring", "zigzag")},
    }
    lines = {label: {"method": method} for label, method in methods.items()}
    columns = {f"{gpus} GPUs": (f"11-22-{gpus}xh200-packed", {}, "{both_ms:.2f}") for gpus in (2, 4)}
    head, rule, *rest = figures("ms, forward and backward, of the slowest rank", lines, columns, absent="not run")
    cells = bold([[cell.strip() for cell in line.strip("|").split("|")] for line in rest], min)
    return [head, rule, *table((), cells)[2:]]


def packed_now() -> Lines:
    """Return packed documents on two GPUs, with the host's work replayed."""
    name = "11-23-2xh200-packed-in-a-row"
    columns = {
        "ms from an idle GPU": (name, {}, "{both_ms:.2f}"),
        "TFLOP/s from an idle GPU": (name, {}, "{both_TFLOP/s:.0f}"),
        "in a row": (name, {}, "{in_a_row_TFLOP/s:.0f}"),
    }
    methods = {"`auto`": "dfa auto auto auto", "layout `load_balanced`": "dfa load_balanced auto auto"}
    return figures("two GPUs", {label: {"method": method} for label, method in methods.items()}, columns)


def packed_zigzag() -> Lines:
    """Return padded packs that are cut document by document, beside Transformer Engine on the same data."""
    name = "11-25-2xh100-packed-zigzag"
    methods = {
        "ours, inside layout `boundary`": "dfa inside",
        "Transformer Engine, p2p": "te p2p",
        "Transformer Engine, a2a": "te a2a",
    }
    shown = {"ms": "{both_ms:.2f}", "TFLOP/s per GPU": "{tflops_per_rank:.0f}"}
    return figures(
        "two H100, forward and backward",
        {label: {"method": method} for label, method in methods.items()},
        {f"{n}K a GPU, {head}": (f"{name}-{n}k", {}, one) for n in (8, 32) for head, one in shown.items()},
        absent="no attention",
    )


def pack_programs() -> Lines:
    """Return the programs of some ranks over packs beside the kernel alone, on one GPU."""
    lines = []
    for label, run in PACKS.items():
        packs = {x["ranks"]: x for x in json.loads((RESULTS / run).read_text("utf-8"))["rows"]}
        form = "{TFLOP/s:.0f} of {bound TFLOP/s:.0f} ({share of the bound:.2f})"
        lines.append([label, *(form.format_map(packs[n]) if n in packs else "not run" for n in (2, 4, 8))])
    return table(["slowest rank of the kernel's TFLOP/s (share); documents", "2 ranks", "4 ranks", "8 ranks"], lines)


def new_packs() -> Lines:
    """Return what a new pack takes on the host, once and in its first calls."""
    shown = {
        "plan": ("contiguous", "new pack ms"),
        "plan, `load_balanced`": ("load_balanced", "new pack ms"),
        "first forward and backward, recorded": ("contiguous", "recorded ms"),
        "later": ("contiguous", "replayed ms"),
    }
    packs = functools.partial(row, "11-24-1xh200-new-packs", commit="505e25a")
    lines = [
        [label, *(f"{packs(layout=layout, ranks=n)[key]:.1f}" for n in (2, 4, 8))]
        for label, (layout, key) in shown.items()
    ]
    calls = [row("11-24-1xh200-first-calls", commit="e3082a8", ranks=n) for n in (4, 8)]
    lines += [
        ["of 80 first calls, over 60 ms", "not run", *(str(one["stalled"]) for one in calls)],
        ["their seconds", "", *(f"{one['stalled ms'] / 1e3:.1f}" for one in calls)],
    ]
    return table(["host ms; ranks", "2", "4", "8"], lines)


_PACKS = "2026-11-23-1xh200-pack-programs"
PACKS = {
    "log-normal, 8K a rank": f"{_PACKS}.json",
    "the same, 32K": f"{_PACKS}-32k.json",
    "the same, 128K": f"{_PACKS}-128k.json",
    "Pile, as in LongCA-bench, 8K": f"{_PACKS}-pile.json",
    "ProLong-64K, 8K": f"{_PACKS}-prolong64k.json",
    "ProLong-512K, 8K": f"{_PACKS}-prolong512k.json",
    "ProLong-512K, 32K": f"{_PACKS}-32k-prolong512k.json",
}


MEASURED = {
    "packed": packed, "packed-now": packed_now, "packed-zigzag": packed_zigzag, "pack-programs": pack_programs,
}  # fmt: skip
"""Of docs/measurements.md."""

TABLES = {"dynamic-cp": dynamic_cp, "new-packs": new_packs}
"""Of docs/packed.md."""
