"""The table of fixed beside dynamic context-parallel size, out of the simulation in `benchmarks/results`."""

from __future__ import annotations

from docs.raw_results import Lines, bold, row, table

FILE = "11-23-dynamic-cp"
METHODS = {
    "dynamic size, Megatron's scheduler and ring": "dynamic",
    "groups of 4, by length, Megatron's ring": "ring 4, by length",
    "groups of 4, ours": "ours 4",
    "groups of 4, by length, ours": "ours 4, by length",
    "one group of all ranks, by length, ours": "ours all, by length",
}
COLUMNS = {
    "4 ranks": ("verl", 4, "nvlink"),
    "16": ("verl", 16, "nvlink"),
    "64": ("verl", 64, "nvlink"),
    "16, slow link": ("verl", 16, "slow link"),
    "4, short": ("megatron", 4, "nvlink"),
    "16, short": ("megatron", 16, "nvlink"),
    "64, short": ("megatron", 64, "nvlink"),
}


def dynamic_cp() -> Lines:
    """Return rates over that of groups of 4 with packs in order and Megatron's ring."""
    rates = [row(FILE, work=work, ranks=ranks, machine=machine)["rate"] for work, ranks, machine in COLUMNS.values()]
    lines = [[label, *(f"{rate[method] / rate['ring 4']:.2f}" for rate in rates)] for label, method in METHODS.items()]
    return table(["tokens/s over groups of 4, in order, Megatron's ring", *COLUMNS], bold(lines))
