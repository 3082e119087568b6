"""Attention alone: tables of TFLOP/s per GPU, forward and backward together, from files of the attention benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from docs.raw_results import K, Line, Lines, bold, figures, row, table

Heads = tuple[int, int]
Column = tuple[str, Heads, int]
"""A column: the file, query and kv heads, and thousands of tokens."""

Methods = tuple[str, ...]
OURS = ("dfa auto flash4",)
ULYSSES, DEEPSPEED = ("ulysses flash4",), ("deepspeed ulysses flash4",)
PYTORCH = ("pytorch allgather", "pytorch alltoall")
TE_RING = ("transformer_engine p2p",)
TE_OTHERS = ("transformer_engine a2a", "transformer_engine a2a+p2p", "transformer_engine all_gather")
PACKAGES: dict[str, Methods] = {
    "ours": OURS,
    "plain Ulysses, the same kernel": ULYSSES,
    "DeepSpeed's Ulysses, the same kernel": DEEPSPEED,
    "Transformer Engine, p2p": TE_RING,
    "Transformer Engine, the best of the others": TE_OTHERS,
    "PyTorch, the best rotation": PYTORCH,
    "yunchang, the best of three": ("yunchang ring", "yunchang 2 x ring", "yunchang ulysses"),
    "ring-flash-attn, the best of three": ("ring-flash-attn ring", "ring-flash-attn zigzag", "ring-flash-attn llama3"),
}
GRID, PEERS = "11-26-4xh100-grid-flash4", "11-22-4xh200-peers-flash4"
ALL, SOME, ONE, ODD = (32, 32), (32, 8), (32, 1), (33, 33)


def rows_of(methods: Methods, column: Column) -> list[dict[str, Any]]:
    """Return the row of each method."""
    name, (heads, kv_heads), length = column
    return [row(name, method=one, heads=heads, kv_heads=kv_heads, seq_length=length * K) for one in methods]


def tflops(methods: Methods, column: Column) -> float:
    """Return TFLOP/s per GPU of the fastest of these methods, forward and backward; 0 where none ran."""
    return max(float(one["both_tflops"]) for one in rows_of(methods, column))


def speed(methods: Methods, column: Column) -> str:
    """Return a cell."""
    if all(one["state"] == "refused" for one in rows_of(methods, column)):
        return "cannot"
    found = tflops(methods, column)
    return f"{found:.0f}" if found else "not run"


def speeds(corner: str, methods: Mapping[str, Methods], columns: Mapping[str, Column]) -> Lines:
    """Return a table of TFLOP/s, a line for each method."""
    lines = [[label, *(speed(some, column) for column in columns.values())] for label, some in methods.items()]
    return table([corner, *columns], bold(lines))


def grid() -> Lines:
    """Return ours, Ulysses and PyTorch on four GPUs."""
    methods = {"ours": OURS, "Ulysses": ULYSSES, "PyTorch": PYTORCH}
    lines: list[Line] = []
    for heads in (ALL, SOME, ODD):
        part = [[label, *(speed(some, (GRID, heads, n)) for n in (8, 16, 32, 128))] for label, some in methods.items()]
        lines += [[f"{heads[0]} on {heads[1]}" if not at else "", *one] for at, one in enumerate(bold(part))]
    return table(["heads on kv heads", "method", "8K", "16K", "32K", "128K"], lines)


def short() -> Lines:
    """Return short calls on two GPUs, with the host's work replayed."""
    methods = {"ours": OURS, "Ulysses": ULYSSES}
    columns = {f"{n}K, {h[0]} on {h[1]}": ("11-22-2xh200-short-flash4", h, n) for h in (ALL, SOME) for n in (8, 16, 32)}
    lines = bold([[label, *(speed(some, one) for one in columns.values())] for label, some in methods.items()])
    return table(["two GPUs", *columns], lines)


def everything_four() -> Lines:
    """Return every installed package on four GPUs, with memory."""
    columns = {f"{n}K, kv {kv}": (PEERS, (32, kv), n) for kv in (32, 8) for n in (32, 128)}
    lines = bold([[label, *(speed(some, one) for one in columns.values())] for label, some in PACKAGES.items()])
    for line, methods in zip(lines, PACKAGES.values(), strict=True):
        for heads in (ALL, SOME):
            fastest = max(rows_of(methods, (PEERS, heads, 128)), key=lambda one: float(one["both_tflops"]))
            line.append(f"{fastest['peak_gib']:.1f}")
    return table(["", *columns, "GiB, kv 32", "GiB, kv 8"], lines)


def long_ones() -> Lines:
    """Return 512K tokens on four GPUs."""
    files = {SOME: "11-22-4xh200-512k-grouped-flash4", ODD: "11-22-4xh200-512k-heads-flash4"}
    methods = {"ours": OURS, "Ulysses": ULYSSES, "PyTorch": PYTORCH}
    lines = []
    for label, some in methods.items():
        cells = [
            "cannot" if heads == ODD and some == ULYSSES else speed(some, (name, heads, 512))
            for heads, name in files.items()
        ]
        lines.append([label, *cells])
    return table(["four GPUs, 512K tokens", "32 on 8", "33 on 33"], bold(lines))


def schedules() -> Lines:
    """Return our schedules on two, four and eight GPUs."""
    dates = {2: "22", 4: "21", 8: "22"}
    names = {"`balanced_shared`, the default": "balanced_shared", "`balanced`, as published": "balanced"}
    names |= {"`ring`": "ring", "layout `zigzag`": "zigzag"}
    columns = {
        f"{gpus} GPUs, {n}K": (f"11-{date}-{gpus}xh200-schedules-flash4", ALL, n)
        for gpus, date in dates.items()
        for n in (32, 128)
    }
    return speeds("", {label: (f"dfa {name} flash4",) for label, name in names.items()}, columns)


def transports() -> Lines:
    """Return copy engines, NCCL, and what messages cost."""
    kinds = {"overlapped": "", "not overlapped": " no_overlap", "nothing sent": " no_communication"}
    methods = {
        f"{transport}, {kind}": (f"dfa balanced_shared flash4 {word}{ablation}",)
        for transport, word in (("copy engines", "copy_engine"), ("NCCL", "p2p"))
        for kind, ablation in kinds.items()
    }
    name = "11-21-4xh200-ablations-flash4"
    lines = [[label, *(speed(some, (name, ALL, n)) for n in (32, 128))] for label, some in methods.items()]
    return table(["four GPUs", "32K", "128K"], lines)


EIGHT = {k: v for k, v in PACKAGES.items() if not k.startswith(("DeepSpeed", "yunchang", "ring-flash"))}
TABLES = {
    "everything-four": everything_four,
    "half-a-million": long_ones,
    "eight": partial(
        speeds, "eight GPUs, 32K tokens", EIGHT,
        {f"kv {kv}": ("11-22-8xh200-peers-flash4", (32, kv), 32) for kv in (32, 8)},
    ),
    "schedules": schedules,
    "transports": transports,
    "without-link": partial(
        speeds, "no direct link", {"ours": OURS, "ours, layout `zigzag`": ("dfa zigzag flash4",), "Ulysses": ULYSSES,
                                   "PyTorch": PYTORCH},
        {f"{n}K, 32 on {kv}": ("11-21-4xh200-p2p-off-flash4", (32, kv), n) for n in (32, 128) for kv in (32, 8)},
    ),
    "two-hosts": partial(
        speeds, "sockets between two hosts",
        {"ours": ("dfa auto auto",), "ours, `ring`": ("dfa ring auto",),
         "ours, `balanced_shared`": ("dfa balanced_shared auto",), "Ulysses": ("ulysses auto",), "PyTorch": PYTORCH},
        {f"{n}K, 32 on {kv}": ("11-27-4xh100-two-hosts", (32, kv), n) for n in (32, 128) for kv in (32, 8)},
    ),
    "bare-kernel": partial(
        figures, "one GPU, kv 8", {"our call": {"kind": "ours"}, "`flash4` alone": {"kind": "kernel"}},
        {f"{n}K, {label}": ("11-23-1xh200-one-gpu", {"seq_length": n * K, "kv_heads": 8}, f"{{{key}:.0f}}")
         for n in (4, 32) for label, key in (("forward", "forward_tflops"), ("both", "both_tflops"))},
    ),
}  # fmt: skip
"""The tables of docs/measurements.md that are about attention alone."""


def readme() -> Lines:
    """Return the README's table of results."""
    methods = {
        "ours": OURS,
        "Ulysses all-to-all, the same kernel": ULYSSES,
        "PyTorch `context_parallel`": PYTORCH,
    }
    columns = {f"{n}K": (GRID, ALL, n) for n in (8, 16, 32, 128)} | {"128K, 33 heads": (GRID, ODD, 128)}
    return speeds("TFLOP/s per GPU", methods, columns)


def kernels() -> Lines:
    """Return block kernels on one GPU, forward / backward."""
    lines = {
        f"{length}K, {form}, {dim}, {kv}": {"seq": length * K, "form": form, "head_dim": dim, "kv": kv, "run": None}
        for length, form, dim, kv in (
            (32, "causal", 128, 32), (32, "full", 128, 32), (32, "causal", 128, 8), (32, "causal", 64, 32),
            (4, "causal", 128, 32), (4, "full", 128, 32),
        )
    }  # fmt: skip
    columns = {
        kernel: ("11-21-1xh200-kernels", {"kernel": kernel}, "{forward:.0f} / {backward:.0f}")
        for kernel in ("flash4", "cudnn", "triton", "aten")
    }
    return figures("length, mask, head_dim, kv heads", lines, columns, absent="not run")
