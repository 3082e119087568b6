"""What `auto` comes to on two GPUs, simulated over links, heads and lengths, and what limits each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dfa_megatron.plan.cost.candidate import Candidate, best
from dfa_megatron.plan.cost.choose import candidates
from dfa_megatron.plan.cost.hardware import H200_NVLINK, H200_SLOW_LINK, H200_SOCKETS, Hardware, computing_with
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape

RANKS = 2
LENGTHS = tuple(1024 * k for k in (8, 16, 32, 64, 128, 512))
HEADS = ((32, 32), (32, 8), (32, 1), (33, 33), (28, 4), (2, 2))
LINKS = {
    "NVLink": computing_with("flash4", H200_NVLINK),
    "`NCCL_P2P_DISABLE=1`": computing_with("flash4", H200_SLOW_LINK),
    "sockets, 2 GB/s": computing_with("flash4", replace(H200_SOCKETS, ranks_per_node=1)),
}
WAITS = 0.1
"""Share of the time that devices wait, from which on the link is said to limit a cell."""


def taken(length: int, heads: tuple[int, int], hardware: Hardware, ranks: int = RANKS) -> Candidate:
    """What `auto` takes for contiguous tokens, with its degree of Ulysses."""
    shape = AttentionShape(heads=heads[0], kv_heads=heads[1], backward_needs="delta")
    about: dict[str, Any] = {"layout": "contiguous", "shape": shape, "hardware": hardware}
    found = best(candidates(causal(length), ranks, **about, degrees=True, kept=True))
    assert found is not None
    return found


def cell(length: int, heads: tuple[int, int], hardware: Hardware) -> str:
    """TFLOP/s per GPU, whether heads are exchanged, and what limits: the host, or messages."""
    one = taken(length, heads, hardware)
    rate = 7 * length**2 * heads[0] * 128 / RANKS / one.seconds / 1e12
    why = ", host" if one.host > one.device else ", link" if one.device > (1 + WAITS) * one.busy else ""
    return f"{rate:.0f}{', degree 2' if one.ulysses_degree > 1 else ''}{why}"


def limits() -> list[str]:
    """Every cell of the grid on two GPUs."""
    rows = ["| link | heads | " + " | ".join(f"{n // 1024}K" for n in LENGTHS) + " |"]
    rows.append("|---" * (2 + len(LENGTHS)) + "|")
    for link, hardware in LINKS.items():
        for heads in HEADS:
            cells = " | ".join(cell(length, heads, hardware) for length in LENGTHS)
            rows.append(f"| {link} | {heads[0]} on {heads[1]} | {cells} |")
    return rows


SITE: dict[str, Callable[[], list[str]]] = {"limits": limits}
