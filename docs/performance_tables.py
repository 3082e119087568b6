"""The tables of measured figures that stand in pages: which cell is which row of which file of `benchmarks/results`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from docs import automatic_tables, hybrid_tables, longest_table, pack_tables
from docs.attention_tables import (
    ALL,
    DEEPSPEED,
    GRID,
    ODD,
    OURS,
    PEERS,
    PYTORCH,
    SOME,
    TE_RING,
    ULYSSES,
    Heads,
    Methods,
    grid,
    kernels,
    readme,
    short,
    tflops,
)
from docs.attention_tables import TABLES as ATTENTION
from docs.raw_results import RESULTS, K, Lines, figures, matching, row, table


def spread(pairs: Iterable[tuple[float, float]]) -> str:
    """Return the least and the largest ratio of pairs."""
    found = sorted(a / b for a, b in pairs)
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def in_short() -> Lines:
    """Return ratios on four GPUs, each within one run."""
    plain = [(GRID, heads) for heads in (ALL, SOME)]
    every, peers = [*plain, (GRID, ODD)], [(PEERS, ALL), (PEERS, SOME)]

    def against(methods: Methods, cells: list[tuple[str, Heads]], length: int) -> list[tuple[float, float]]:
        return [(tflops(OURS, (*cell, length)), tflops(methods, (*cell, length))) for cell in cells]

    both = [against(ULYSSES, plain, n) + against(ULYSSES + DEEPSPEED, peers, n) for n in (32, 128)]
    layer = {m: row(LAYERS4, mode=m, length=128 * K, groups=8)["ms_per_layer"] for m in ("remat", "te-full", "te")}
    lines = [
        ["attention, beside PyTorch's `context_parallel`", *(spread(against(PYTORCH, every, n)) for n in (32, 128))],
        ["attention, beside Transformer Engine's ring", *(spread(against(TE_RING, peers, n)) for n in (32, 128))],
        ["attention, beside the fastest Ulysses on the same kernel, where the heads divide", *map(spread, both)],
    ]
    for label, mode in (
        ("Megatron layer with rematerialization, beside Transformer Engine with full recomputation", "te-full"),
        ("the same, beside Transformer Engine without recomputation, which takes twice the memory", "te"),
    ):
        lines.append([label, "", f"{layer[mode] / layer['remat']:.2f}"])
    for label, ours, theirs in (
        ("ZeRO-3 training with rematerialization, beside DeepSpeed's Ulysses with full checkpointing", "remat", "full"),
        ("ZeRO-3 training without checkpointing, both", "none", "none"),
    ):
        pairs = [
            [
                row(ZERO4, shape="llama-3-8b", method=method, length=n * K)["tokens_per_second_per_gpu"]
                for method in (f"dfa-{ours}", f"ulysses-{theirs}")
            ]
            for n in (32, 128)
        ]
        lines.append([label, *(f"{a / b:.2f}" for a, b in pairs)])
    return table(["on four GPUs, how many times as fast", "32K tokens", "128K tokens"], lines)


LAYERS2, LAYERS4 = "11-22-2xh200-megatron-layers", "11-22-4xh200-megatron-layers"
TRAINING4 = "11-22-4xh200-megatron-training"
MODES = {
    "ours, rematerialization": "remat",
    "the same, among Transformer Engine's modules": "remat-te",
    "the same, its linear layers in fp8": "remat-te-fp8",
    "ours, Megatron's full recomputation": "full",
    "Transformer Engine's p2p, full recomputation": "te-full",
    "ours, no recomputation": "none",
    "Transformer Engine's p2p, no recomputation": "te",
}
ZERO4, ZERO2 = "11-22-4xh200-deepspeed-training-no-remat", "11-22-2xh200-deepspeed-training-no-remat"
FORMS = {
    "ours, `remat`": "dfa-remat",
    "DeepSpeed's Ulysses, full checkpointing": "ulysses-full",
    "ours, none": "dfa-none",
    "DeepSpeed's Ulysses, none": "ulysses-none",
}


def layers() -> Lines:
    """Return milliseconds and memory of a Megatron layer."""
    shown, where = "{ms_per_layer:.0f} ({peak_gib:.1f})", {"length": 128 * K, "groups": 8}
    columns = {"2 GPUs": (LAYERS2, where, shown), "4 GPUs": (LAYERS4, where, shown)}
    lines = {label: {"mode": mode} for label, mode in MODES.items()}
    return figures("128K tokens: ms of a layer (peak, GiB)", lines, columns, absent="not run")


def megatron_training() -> Lines:
    """Return whole training steps on four GPUs."""
    lines = {
        label: {"mode": MODES[label], "length": 128 * K, "num_layers": 4}
        for label in MODES
        if MODES[label] in ("remat", "full", "te-full", "none", "te")
    }
    shown = {
        "tokens/s per GPU": "{tokens_per_second_per_gpu:,.0f}",
        "TFLOP/s per GPU": "{tflops_per_gpu:.0f}",
        "GiB": "{peak_gib:.1f}",
    }
    at_128 = figures("four GPUs", lines, {head: (TRAINING4, {}, cell) for head, cell in shown.items()})
    longest = {"1M tokens, two layers, rematerialization": {"mode": "remat", "length": K * K, "num_layers": 2}}
    return at_128 + figures("", longest, {h: (f"{TRAINING4}-1m", {}, cell) for h, cell in shown.items()})[2:]


def deepspeed() -> Lines:
    """Return training with ZeRO-3."""
    lengths = {f"{n}K": (n, "{tokens_per_second_per_gpu:,.0f}") for n in (32, 64, 128)}
    lengths["GiB at 128K"] = (128, "{peak_gib:.1f}")
    out: Lines = []
    for gpus, name in (("4", ZERO4), ("2", ZERO2)):
        lines = {f"{gpus} GPUs: {form}": {"method": method} for form, method in FORMS.items()}
        columns = {
            head: (name, {"shape": "llama-3-8b", "length": n * K}, shown) for head, (n, shown) in lengths.items()
        }
        out += figures("tokens/s per GPU", lines, columns)[2 if out else 0 :]
    name, odd = "11-22-4xh200-deepspeed-training", {"4 GPUs, 33 heads: ours, `remat`": {"method": "dfa-remat"}}
    columns = {head: (name, {"shape": "33-heads", "length": n * K}, shown) for head, (n, shown) in lengths.items()}
    return out + figures("", odd, columns)[2:]


def longest() -> Lines:
    """Return seconds of a step of one layer at a million tokens and more."""
    lines = []
    for size, length, gpus, theirs in (
        ("768k", 768, 1, "-alst"), ("1m", 1024, 2, ""), ("1.5m", 1536, 2, ""), ("2m", 2048, 4, ""),
        ("3m", 3072, 4, "-alst"),
    ):  # fmt: skip
        shown, name = "{seconds_per_step:.1f} ({peak_gib:.1f})", f"11-22-{gpus}xh200-deepspeed-longest-{size}"
        columns = {
            "ours, s per step (GiB)": (name, {"method": "dfa-remat"}, shown),
            "ALST, s per step (GiB)": (name + theirs, {"method": "ulysses-full"}, shown),
        }
        line = {f"{size.upper()}, {gpus}": {"length": length * K}}
        lines.append(figures("tokens, GPUs", line, columns, absent="did not end in time"))
    return lines[0][:2] + [one[2] for one in lines]


def tiled_loss() -> Lines:
    """Return time and memory of the loss by tiles."""
    name, lines = "11-23-2xh200-tiled-loss", {f"tiles of {tile} tokens": {"mode": f"{tile}"} for tile in (4096, 16384)}
    columns = {
        f"{label}, {n}K": (name, {"pass": kind, "tokens": n * K}, "{ms:.0f} ({more_gib:.1f})")
        for label, kind in (("loss", "train"), ("log-probabilities", "logprobs")) for n in (64, 128)
    }  # fmt: skip
    return figures("two GPUs, ms (GiB)", lines, columns)


def losses() -> Lines:
    """Return losses and steps of Megatron's unchanged script."""
    runs = {
        n: {
            run["run"]: run
            for run in json.loads((RESULTS / f"2026-11-26-2xh100-pretrain-gpt-{n}k.json").read_text("utf-8"))["runs"]
        }
        for n in (8, 64)
    }
    names = {"Megatron's own attention on one GPU": "own-1", "ours on two, by flags": "flags"}
    names |= {"ours on two, by flags, before 26 November 2026": "before", "ours on two, loss by tiles": "launcher"}
    lines = []
    for label, name in names.items():
        short, long = runs[8][name], runs[64].get(name, {})
        away = f"{short['largest_difference']:.4f}" if name != "own-1" else ""
        lines.append([label, away, f"{short['ms_per_step']:.0f}", f"{long['ms_per_step']:.0f}" if long else ""])
    head = ["`pretrain_gpt.py`, two H100", "largest difference of a loss, 8K", "ms a step, 8K", "64K"]
    return table(head, lines)


def qwen() -> Lines:
    """Return a whole Qwen3-4B."""
    columns = {
        f"{gpus} GPUs": (
            f"11-22-{gpus}xh200-deepspeed-qwen3-4b", {}, "{tokens_per_second_per_gpu:,.0f} ({peak_gib:.1f})"
        )
        for gpus in (2, 4)
    }  # fmt: skip
    lines = {label: {"method": FORMS[label]} for label in list(FORMS)[:2]}
    return figures("tokens/s per GPU (GiB)", lines, columns)


def host() -> Lines:
    """Return the host's milliseconds of a call, as it stands and replayed."""
    columns = {str(n): f"program {n}" for n in (1, 2, 4, 8)} | {"2, whole call": "function"}
    pytorchs = "empty function"  # nothing of it is replayed by us
    lines = []
    for gpus in ("11-23-{}xh200", "11-24-{}xh100"):
        one, two = (matching(gpus.format(n) + "-host-time", {}) for n in (1, 2))
        known = {x["case"]: x for x in (*one, *two)}  # a whole call is one of two ranks
        for label, way in WAYS.items():
            shown = [*columns.values(), pytorchs if way == "bound" else ""]
            cells = [f"{known[case][way]:.2f}" if case in known else "" for case in shown]
            lines.append([f"{gpus[-4:].upper()}, {label}", *cells])
    return table(["host ms, forward + backward; ranks", *columns, "PyTorch's part"], lines)


def verify_cost() -> Lines:
    """Return what comparing the calls and watching the ranks add to the host's part of a call."""
    name, lines = "11-25-2xh100-verify-cost", []
    for label, transport in (("NCCL", "p2p"), ("copy engines", "copy_engine")):
        ms = row(name, transport=transport)
        steps = [ms["host_ms_on"] - ms["host_ms_off"], ms["host_ms_off"] - ms["host_ms_before"], ms["host_ms_on"]]
        lines.append([label, *(f"{step:.2f}" for step in steps)])
    return table(["two H100, 8K tokens, host ms a call", "comparing", "watching", "with both"], lines)


WAYS = {"as it stands": "unbound", "replayed": "bound"}


PAGES: dict[str, dict[str, Callable[[], Lines]]] = {
    "README.md": {"results": readme},
    "docs/performance.md": {
        "in-short": in_short, "grid": grid, "short": short, "megatron-training": megatron_training, "qwen": qwen,
    },
    "docs/measurements.md": {
        "host": host, **ATTENTION, **automatic_tables.TABLES, **pack_tables.MEASURED, "layers": layers,
        "losses": losses, "deepspeed": deepspeed, "longest": longest,
    },
    "docs/remat.md": {"longest": longest_table.longest},
    "docs/packed.md": pack_tables.TABLES,
    "docs/hybrids.md": hybrid_tables.TABLES,
    "docs/kernels.md": {"speed": kernels},
    "docs/loss.md": {"tiles": tiled_loss},
    "docs/trust.md": {
        "verify-cost": verify_cost,
    },
}  # fmt: skip
"""The tables of each page, by the name between its marks."""
