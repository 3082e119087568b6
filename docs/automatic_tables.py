"""What `auto` comes to on two GPUs, over links, heads and lengths: simulated with what limits, and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dfa_megatron.plan.cost.choose import Candidate, best, candidates
from dfa_megatron.plan.cost.hardware import H200_NVLINK, H200_SLOW_LINK, H200_SOCKETS, Hardware, computing_with
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape
from docs.raw_results import Lines, matching, table

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


def measured() -> Lines:
    """Return ours with all defaults, and how many times as fast it is as the best of the others in the same run."""
    files = zip(LINKS, ("", "-p2p-off", "-sockets"), strict=True)
    lines = []
    for link, name in files:
        for heads, kv_heads in ((32, 32), (32, 8), (33, 33), (2, 2)):
            cells = []
            for length in (8192, 32768, 131072):
                where = {"heads": heads, "kv_heads": kv_heads, "seq_length": length, "state": "timed"}
                timed = matching(f"11-23-2xh200-automatic{name}", where)
                ours = [one["both_tflops"] for one in timed if one["kind"] == "ours"]
                others = [one["both_tflops"] for one in timed if one["kind"] != "ours"]
                cells.append(f"{ours[0]:.0f} ({ours[0] / max(others):.2f})" if ours and others else "not run")
            lines.append([link, f"{heads} on {kv_heads}", *cells])
    return table(["link", "heads", "8K", "32K", "128K"], [line for line in lines if set(line[2:]) != {"not run"}])


TABLES: dict[str, Callable[[], list[str]]] = {"automatic": measured, "limits": limits}
