"""The tables of docs/paper.md: what the paper claims, and what the files of `benchmarks/results` say about it."""

from __future__ import annotations

from functools import partial

from docs import measured
from docs.measured import GRID, PEERS, ULYSSES, K, Lines, cell, faster, layer, matching, row, table, training

ABSENT = "not run"
SCHEDULES = "11-22-8xh200-schedules-flash4"
HEAD = ("beside", "theirs", "ours", "why they differ", "cell")


def newest(cell: str, card: str = "h200") -> str | None:
    """Return the newest file of a cell, on the most GPUs of a kind; None if the cell has not run there."""
    for gpus in (8, 4, 2):
        if found := sorted(measured.RESULTS.glob(f"*-{gpus}x{card}-{cell}.json")):
            return found[-1].stem.partition("-")[2]
    return None


def end_to_end(cell: str, heads: int, groups: int, baseline: str, card: str = "h200", padded: int = 0) -> str:
    """Return how many times as fast as a baseline a layer is, at every length of a cell.

    padded: heads and groups of the baseline, where they are others.
    """
    if (name := newest(cell, card)) is None:
        return ABSENT
    said = []
    for ours in matching(name, {"mode": "remat", "heads": heads, "groups": groups}):
        shape = {"heads": padded or heads, "groups": padded or groups, "length": ours["length"]}
        theirs = row(name, mode=baseline, **shape)
        if "ms_per_layer" not in theirs:
            times = "cannot" if "cannot" in theirs else "theirs out of memory"
        elif "ms_per_layer" not in ours:
            times = "ours out of memory"
        else:
            times = f"{theirs['ms_per_layer'] / ours['ms_per_layer']:.2f}"
        said.append(f"{times} at {ours['length'] // K}K")
    return f"{name.split('-')[2].partition('x')[0]} GPUs: {', '.join(said)}"


def balance() -> str:
    """Return the published schedule and the default over the ring, forward, on eight GPUs."""
    ring, ours, shared = (
        row(SCHEDULES, method=f"dfa {name} flash4", seq_length=128 * K)["forward_tflops"]
        for name in ("ring", "balanced", "balanced_shared")
    )
    return f"{ours / ring:.2f}; `balanced_shared` {shared / ring:.2f}"


def overlap() -> str:
    """Return what messages add to a call without and with overlap, over NCCL on four GPUs."""
    said = []
    for length in (32, 128):
        less, more, bare = (
            row("11-21-4xh200-ablations-flash4", method=f"dfa balanced_shared flash4 p2p{kind}", seq_length=length * K)
            for kind in ("", " no_overlap", " no_communication")
        )
        added = [f"{100 * (one['both_ms'] / bare['both_ms'] - 1):.0f} %" for one in (more, less)]
        said.append(f"{length}K: {' to '.join(added)}")
    return "; ".join(said)


def few_heads() -> str:
    """Return the rate of two heads over that of 33 at 512K on two GPUs."""
    two, many = (
        row("11-22-2xh200-512k-heads-flash4", method="dfa auto flash4", heads=heads)["both_tflops"] for heads in (2, 33)
    )
    return f"2 heads at {two / many:.2f} of the rate of 33"


def ulysses() -> str:
    """Return ours over Ulysses at 128K on four GPUs: training with and without checkpoints, and attention alone."""
    odd = {"file": GRID, "method": ULYSSES[0], "heads": 33, "seq_length": "128K", "show": "{both_tflops:.0f}"}
    trained = f"{training('remat', 'full', 128):.2f}; not checkpointed {training('none', 'none', 128):.2f}"
    return f"{trained}; attention {faster(PEERS, ULYSSES, 128):.2f}; 33 heads {cell(odd)}"


def sent() -> str:
    """Return the bytes of TP + SP with full recomputation (14 chunks for each other rank) over the busiest rank's."""
    chunk = 128 / 8 * K * 32 * 128 * 2 / 2**20
    ours = row(SCHEDULES, method="dfa balanced flash4", seq_length=128 * K)["sent_mib"]
    return f"{14 * 7 * chunk / ours:.1f}, by the busiest rank"


def longest() -> str:
    """Return the longest sequence on four GPUs, and the seconds of ALST's step over ours where one run has both."""
    name = "11-22-4xh200-deepspeed-longest-{}m"
    most = row(name.format(3), method="dfa-remat")["length"] // K**2
    theirs, ours = (
        row(name.format(2), method=method, length=2 * K * K)["seconds_per_step"]
        for method in ("ulysses-full", "dfa-remat")
    )
    return f"{most}M on 4 GPUs; ALST's step at 2M {theirs / ours:.2f} times as long"


def claims() -> Lines:
    """Return the table."""
    recomputed = ", ".join(f"{n}K: {layer('remat', 'full', n, kv):.2f}" for n, kv in ((64, 8), (128, 32)))
    engine = ", ".join(f"{name} {layer('remat', 'te-full', 128, kv):.2f}" for name, kv in (("7B", 32), ("GQA", 8)))
    return table(HEAD, [
        ["7B, Megatron's TP + SP", "1.14 to 1.24", end_to_end("paper-7b", 32, 32, "tp-te-full"),
         "theirs without its checkpointing: 0.95 to 0.98", "`paper-7b`"],
        ["2 to 16 heads", "512K; Megatron 64K to 512K", few_heads(), "tokens are shared, not heads",
         "`paper-few-heads`"],
        ["Ulysses", "1.26; 33 heads 1.88", ulysses(), "theirs names no checkpointing", "`paper-ulysses`"],
        ["ring without balance", "1.67", balance(), "`balanced_shared` leaves no rank idle", "`paper-schedules`"],
        ["messages add, without overlap to with", "128K: 105 % to 44 %", overlap(), "InfiniBand there, NVLink here",
         "`paper-ablations`"],
        ["checkpointing alone", "64K: 1.16, 128K: 1.24", recomputed, "FLOPs alone give 1.20 at 128K", "`paper-7b`"],
        ["bytes, TP + SP", "4.7", sent(), "theirs is a mean; TP by formula", "`paper-schedules`"],
        ["longest", "512K on 16 GPUs of 40 GB", longest(), "one layer here, 7B there", "`paper-longest`"],
        ["Transformer Engine's CP", "none", engine, "younger than the paper", "`paper-7b`"],
    ])  # fmt: skip


def ring_self_attention() -> str:
    """Return how many times as fast as Ring Self-Attention ours is, and the longest of both that ran."""
    if (name := newest("paper-rsa", "h100")) is None:
        return ABSENT
    ours, theirs = (
        {one["seq_length"]: one["both_ms"] for one in matching(name, {"method": method, "state": "timed"})}
        for method in ("dfa auto auto", "ring_self_attention")
    )
    times = ", ".join(f"{theirs[n] / ours[n]:.1f} at {n // K}K" for n in sorted(theirs) if n // K in (8, 16, 32))
    return f"{times}; no more than {max(theirs) // K}K fit it, ours ran {max(ours) // K}K"


def claims_h100() -> Lines:
    """Return the table of what ran on H100."""
    h100 = partial(end_to_end, card="h100")
    return table(HEAD, [
        ["7B, Megatron's TP + SP", "1.14 to 1.24", h100("paper-7b", 32, 32, "tp-te-full"), "longer here", "`paper-7b`"],
        ["GQA, Megatron's TP + SP", "1.18 to 1.26", h100("paper-gqa", 32, 8, "tp-te-full"),
         "TP sends as much with 8 kv heads", "`paper-gqa`"],
        ["33 heads, TP + SP padded to 34, as 2 GPUs need", "none", h100("paper-33h", 33, 33, "tp-te-full", padded=34),
         "2 GPUs pad less", "`paper-33h`"],
        ["33 heads, TP + SP padded to 40, as 8 GPUs need", "1.38 to 1.50",
         h100("paper-33h", 33, 33, "tp-te-full", padded=40), "8 GPUs there, 2 here", "`paper-33h`"],
        ["7B, Transformer Engine's CP", "none", h100("paper-7b", 32, 32, "te-full"), "younger than the paper",
         "`paper-7b`"],
        ["GQA, Transformer Engine's CP", "none", h100("paper-gqa", 32, 8, "te-full"), "younger than the paper",
         "`paper-gqa`"],
        ["Ring Self-Attention", "4.45 to 5.64", ring_self_attention(), "attention alone here, steps there",
         "`paper-rsa`"],
    ])  # fmt: skip


PAGES = {"paper": {"claims": claims, "claims-h100": claims_h100}}
