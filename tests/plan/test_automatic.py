"""What `auto` takes, over links, lengths and heads: never slower than another choice, and as measurements say."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from dfa_megatron.plan.cost.choose import Candidate, candidates
from dfa_megatron.plan.cost.hardware import H200_NVLINK, H200_SLOW_LINK, H200_SOCKETS, computing_with
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.sizes import Sizes

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LINKS = {
    "nvlink": computing_with("flash4", H200_NVLINK),
    "p2p-off": computing_with("flash4", H200_SLOW_LINK),
    "sockets": computing_with("flash4", replace(H200_SOCKETS, ranks_per_node=1)),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["state"] == "timed" and row["mask"] == "causal"]


def of_heads(heads: int, kv_heads: int) -> Sizes:
    return Sizes(heads=heads, kv_heads=kv_heads, backward_needs="delta")


MEASURED = {
    "2026-11-21-4xh200-p2p-off-flash4": "p2p-off",
    "2026-11-21-4xh200-schedules-flash4": "nvlink",
    "2026-11-21-4xh200-ulysses-flash4": "nvlink",
    "2026-11-22-2xh200-p2p-off-flash4": "p2p-off",
    "2026-11-22-2xh200-p2p-off-heads-flash4": "p2p-off",
    "2026-11-22-2xh200-peers-flash4": "nvlink",
    "2026-11-22-2xh200-schedules-flash4": "nvlink",
    "2026-11-22-2xh200-short-flash4": "nvlink",
    "2026-11-22-4xh200-p2p-off-degrees-flash4": "p2p-off",
    "2026-11-22-8xh200-schedules-flash4": "nvlink",
}
"""Forward and backward on flash4, before and after replays. Only rows without exchanged heads are compared, and cells
that the device bounds: the host's time changed since.
"""


def named(row: dict[str, Any]) -> str | None:
    """Return the schedule of a row that the simulator knows, else None."""
    words = row["method"].split()
    if words[0] != "dfa" or words[-1].startswith("ulysses") or "graph" in words:
        return None
    if row["both_host_ms"] > 0.5 * row["both_ms"]:
        return None
    return row["took"] if words[1] == "auto" else words[1]


def simulated(looked_at: tuple[Candidate, ...], schedule: str) -> float | None:
    """Return the milliseconds of a schedule's device."""
    for one in looked_at:
        if one.cost and (one.schedule if one.layout == "contiguous" else one.layout) == schedule:
            return 1e3 * one.cost.makespan
    return None


@lru_cache(maxsize=1)
def cells() -> list[dict[str, tuple[float, float]]]:
    """Return (measured, simulated) milliseconds by method of each file, length and heads."""
    found = list[dict[str, tuple[float, float]]]()
    for name, link in MEASURED.items():
        by_cell: dict[tuple[int, ...], dict[str, float]] = {}
        for row in rows_of(name):
            if (method := named(row)) is not None:
                cell = (row["ranks"], row["heads"], row["kv_heads"], row["seq_length"])
                by_cell.setdefault(cell, {})[method] = row["both_ms"]
        for (ranks, heads, kv_heads, length), measured in by_cell.items():
            about: dict[str, Any] = {"sizes": of_heads(heads, kv_heads), "hardware": LINKS[link]}
            looked_at = candidates(causal(length), ranks, **about)
            both = {method: (ms, simulated(looked_at, method)) for method, ms in measured.items()}
            found.append({method: (ms, model) for method, (ms, model) in both.items() if model is not None})
    return found


def test_the_simulation_orders_what_was_measured_where_it_differs_by_an_eighth() -> None:
    pairs = [pair for cell in cells() for pair in combinations(cell.values(), 2)]
    clear = [(a, b) for a, b in pairs if max(a[0], b[0]) > 1.125 * min(a[0], b[0])]
    assert len(clear) > 45
    for a, b in clear:
        assert (a[0] < b[0]) == (a[1] < b[1]), (a, b)


def test_nine_tenths_of_the_simulated_times_are_within_a_tenth_of_the_measured() -> None:
    errors = sorted(abs(model / ms - 1) for cell in cells() for ms, model in cell.values() if ms > 5)
    assert len(errors) > 80
    assert errors[len(errors) * 9 // 10] < 0.1
    assert errors[-1] < 0.25
