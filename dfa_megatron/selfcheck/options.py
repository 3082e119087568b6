"""Adapt our own options to a CPU, and read them from a command line; the same for every framework."""

from __future__ import annotations

from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.selfcheck.case import Reductions

MOST_RANKS, MOST_SEQUENCE_RANKS = 16, 32
"""Processes at most; more than that only as ranks of one sequence, whose number is never reduced."""


def on_cpu(options: DistAttentionConfig, prefix: str, reduced: Reductions) -> dict[str, Any]:
    """The options as a dictionary, with what a CPU runs in the place of what needs a GPU; each change is listed.

    Args:
        prefix: how the user writes an option: "--dfa-" for a flag, else as in a file.
    """
    values: dict[str, Any] = {name: getattr(options, name) for name in options.__dataclass_fields__}
    instead = {"transport": "auto", "cuda_graph": False, "remat_offload": False}
    if values["kernel"] not in ("auto", "reference", "cpu"):
        instead["kernel"] = "auto"
    for name, runs in instead.items():
        if values[name] != runs:
            written = name.replace("_", "-") if prefix.startswith("--") else name
            reduced.note(prefix + written, str(values[name]), f"{runs}, on a CPU")
            values[name] = runs
    return values


def unseen(options: DistAttentionConfig) -> list[str]:
    """List the parts of these options that no check on a CPU covers."""
    lines = [
        "GPU kernels and transports: `dfa-megatron doctor` compares kernels on the GPUs themselves",
        "your data and weights: tokens and initial weights are random, the same on every rank",
    ]
    if "auto" in (options.schedule, options.ulysses_degree):
        lines.append("the schedule of auto at your sizes, where it is another than at these: name it to check it")
    return lines
