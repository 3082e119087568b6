"""The tables of measured figures: which cell is which row of which file of `benchmarks/results`.

A cell is the one row of a file whose fields have the given values; two such rows, or none, are an error. The fastest
cell of a column is bold. "cannot" stands for a method that refuses the shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
K = 1024
Line = list[str]


@cache
def results(name: str) -> dict[str, Any]:
    """Return a raw file, named without its year, as `11-22-4xh200-packed`."""
    found: dict[str, Any] = json.loads((RESULTS / f"2026-{name}.json").read_text(encoding="utf-8"))
    return found


def row(name: str, **where: object) -> dict[str, Any]:
    """Return the one row of a file with these values.

    Raises:
        LookupError: no row or several rows have them.
    """
    file = results(name)
    rows = [one for key in ("rows", "results", "layers", "training") for one in file.get(key, [])]
    found = [one for one in rows if all(one[key] == value for key, value in where.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name} have {where}")
    return dict(found[0])


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    first, *rest = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return [first, "|---" * len(head) + "|", *rest]


def bold(lines: Sequence[Line], columns: Iterable[int], best: Callable[..., float] = max) -> list[Line]:
    """Mark the best number of each of these columns, and every cell that shows the same."""
    out = [list(line) for line in lines]
    for column in columns:
        numbers = [float(line[column].replace(",", "")) for line in out if line[column][:1].isdigit()]
        for line in out:
            if numbers and line[column][:1].isdigit() and float(line[column].replace(",", "")) == best(numbers):
                line[column] = f"**{line[column]}**"
    return out


def ratio(numerator: float, denominator: float) -> str:
    """Return how many times as large a number is."""
    return f"{numerator / denominator:.2f}"


# Attention alone: files of the attention benchmark.

OURS, GRAPH, ULYSSES, DEEPSPEED = (
    "dfa auto flash4",
    "dfa auto flash4 graph",
    "ulysses flash4",
    "deepspeed ulysses flash4",
)
PYTORCH = ("pytorch allgather", "pytorch alltoall")
TE = ("transformer_engine p2p", "transformer_engine a2a", "transformer_engine a2a+p2p", "transformer_engine all_gather")
RING = ("ring-flash-attn ring", "ring-flash-attn zigzag", "ring-flash-attn llama3")
YUNCHANG = ("yunchang ring", "yunchang 2 x ring", "yunchang ulysses")
Methods = str | tuple[str, ...]
Heads = tuple[int, int]


def _attention(name: str, methods: Methods, heads: Heads, length: int) -> list[dict[str, Any]]:
    names = (methods,) if isinstance(methods, str) else methods
    where = {"heads": heads[0], "kv_heads": heads[1], "seq_length": length * K}
    return [row(name, method=method, **where) for method in names]


def tflops(name: str, methods: Methods, heads: Heads, length: int) -> float:
    """Return TFLOP/s per GPU of the fastest of these methods, forward and backward; 0 where none ran."""
    return max(float(one["both_tflops"]) for one in _attention(name, methods, heads, length))


def speed(name: str, methods: Methods, heads: Heads, length: int) -> str:
    """Return a cell."""
    rows = _attention(name, methods, heads, length)
    if all(one["state"] == "refused" for one in rows):
        return "cannot"
    found = tflops(name, methods, heads, length)
    return f"{found:.0f}" if found else "not run"


def memory(name: str, methods: Methods, heads: Heads, length: int) -> str:
    """Return the peak of the fastest of these methods, in GiB; empty where none ran."""
    fastest = max(_attention(name, methods, heads, length), key=lambda one: float(one["both_tflops"]))
    return f"{fastest['peak_gib']:.1f}" if fastest["state"] == "timed" else ""


def spread(pairs: Iterable[tuple[float, float]]) -> str:
    """Return the least and the largest ratio of pairs."""
    found = sorted(a / b for a, b in pairs)
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


GRID, PEERS = "11-21-4xh200-grid-flash4", "11-22-4xh200-peers-flash4"
PLAIN: tuple[Heads, ...] = ((32, 32), (32, 8), (32, 1))


def in_short() -> list[str]:
    """Ratios on four GPUs, each within one run."""

    def against(length: int, cells: Iterable[tuple[str, Heads]], methods: Methods) -> str:
        pairs = ((tflops(n, OURS, h, length), tflops(n, methods, h, length)) for n, h in cells)
        return spread(pairs)

    grid = [(GRID, heads) for heads in (*PLAIN, (33, 33))]
    peers = [(PEERS, (32, 32)), (PEERS, (32, 8))]
    lines = [
        ["attention, beside PyTorch's `context_parallel`", *(against(n, grid, PYTORCH) for n in (32, 128))],
        ["attention, beside Transformer Engine's ring", *(against(n, peers, TE[0]) for n in (32, 128))],
    ]
    both = []
    for length in (32, 128):
        pairs = [(tflops(GRID, OURS, h, length), tflops(GRID, ULYSSES, h, length)) for h in PLAIN]
        pairs += [(tflops(n, OURS, h, length), tflops(n, (ULYSSES, DEEPSPEED), h, length)) for n, h in peers]
        both.append(spread(pairs))
    lines.append(["attention, beside the fastest Ulysses on the same kernel, where the heads divide", *both])
    layer = {m: row(LAYERS4, mode=m, length=128 * K, groups=8)["ms_per_layer"] for m in ("remat", "te-full", "te")}
    lines += [
        ["Megatron layer with rematerialization, beside Transformer Engine with full recomputation", "",
         ratio(layer["te-full"], layer["remat"])],
        ["the same, beside Transformer Engine without recomputation, which takes twice the memory", "",
         ratio(layer["te"], layer["remat"])],
    ]  # fmt: skip
    for ours, theirs, label in (
        (
            "dfa-remat",
            "ulysses-full",
            "ZeRO-3 training with rematerialization, beside DeepSpeed's Ulysses with full checkpointing",
        ),
        ("dfa-none", "ulysses-none", "ZeRO-3 training without checkpointing, both"),
    ):
        cells = [(zero(NO_REMAT4, ours, n), zero(NO_REMAT4, theirs, n)) for n in (32, 128)]
        lines.append([label, *(ratio(a, b) for a, b in cells)])
    return table(["on four H200, how many times as fast", "32K tokens", "128K tokens"], lines)


def grid() -> list[str]:
    """Ours, Ulysses and PyTorch on four GPUs."""
    lines: list[Line] = []
    for heads in (*PLAIN, (33, 33), (2, 2)):
        methods = (("ours", OURS), ("ours, `cuda_graph`", GRAPH), ("Ulysses", ULYSSES), ("PyTorch", PYTORCH))
        rows = [[label, *(speed(GRID, m, heads, n) for n in (8, 32, 64, 128))] for label, m in methods]  # fmt: skip
        group = bold(rows, range(1, 5))
        lines += [[f"{heads[0]} on {heads[1]}" if not at else "", *one] for at, one in enumerate(group)]
    return table(["heads on kv heads", "method", "8K", "32K", "64K", "128K"], lines)


NAMES: tuple[tuple[str, Methods], ...] = (
    ("ours", OURS),
    ("plain Ulysses, the same kernel", ULYSSES),
    ("DeepSpeed's Ulysses, the same kernel", DEEPSPEED),
    ("Transformer Engine, p2p", TE[0]),
    ("Transformer Engine, the best of the others", TE[1:]),
    ("PyTorch, the best rotation", PYTORCH),
    ("yunchang, the best of three", YUNCHANG),
    ("ring-flash-attn, the best of three", RING),
)


def everything_four() -> list[str]:
    """Every installed package on four GPUs."""
    lines = []
    for label, methods in NAMES:
        cells = []
        for heads in ((32, 32), (32, 8)):
            cells += [speed(PEERS, methods, heads, n) for n in (32, 128)] + [memory(PEERS, methods, heads, 128)]
        lines.append([label, *cells])
    head = ["", "32K, kv 32", "128K, kv 32", "GiB", "32K, kv 8", "128K, kv 8", "GiB"]
    return table(head, bold(lines, (1, 2, 4, 5)))


PEERS2, FEW2 = "11-22-2xh200-peers-flash4", "11-22-2xh200-kv1-33-heads-flash4"


def everything_two() -> list[str]:
    """The strongest packages on two GPUs."""
    lines: list[Line] = []
    chosen = (("ours", OURS), ("Ulysses", ULYSSES), ("Transformer Engine, p2p", TE[0]), ("PyTorch", PYTORCH))
    for name, heads in ((PEERS2, (32, 32)), (PEERS2, (32, 8)), (FEW2, (32, 1)), (FEW2, (33, 33))):
        rows = [
            [label, *(speed(name, m, heads, n) for n in (8, 32, 64, 128)), memory(name, m, heads, 128)]
            for label, m in chosen
        ]
        lines += [[f"{heads[0]} on {heads[1]}" if not n else "", *one] for n, one in enumerate(bold(rows, range(1, 5)))]
    return table(["heads on kv heads", "method", "8K", "32K", "64K", "128K", "GiB"], lines)


def half_a_million() -> list[str]:
    """512K tokens on two and four GPUs."""
    names = {
        2: {(32, 32): "11-22-2xh200-512k-kv32-flash4", (32, 8): "11-22-2xh200-512k-flash4",
            (32, 1): "11-22-2xh200-512k-kv1-flash4", (33, 33): "11-22-2xh200-512k-heads-flash4",
            (2, 2): "11-22-2xh200-512k-heads-flash4"},
        4: {(32, 32): "11-21-4xh200-512k-flash4", (32, 8): "11-22-4xh200-512k-grouped-flash4",
            (32, 1): "11-22-4xh200-512k-grouped-flash4", (33, 33): "11-22-4xh200-512k-heads-flash4",
            (2, 2): "11-22-4xh200-512k-heads-flash4"},
    }  # fmt: skip
    lines = []
    for gpus, files in names.items():
        for label, methods in (("ours", OURS), ("Ulysses", ULYSSES), ("PyTorch", PYTORCH)):
            cells = []
            for heads, name in files.items():
                there = {one["method"] for one in results(name)["rows"]}
                if not there & set((methods,) if isinstance(methods, str) else methods):
                    cells.append("cannot" if methods == ULYSSES and heads[0] == 33 else "not run")
                else:
                    at = memory(name, methods, heads, 512) if name != "11-21-4xh200-512k-flash4" else ""
                    cells.append(speed(name, methods, heads, 512) + (f" ({at})" if at else ""))
            lines.append([f"{gpus} GPUs, {label}", *cells])
    return table(["", "32 on 32", "32 on 8", "32 on 1", "33 on 33", "2 on 2"], lines)


def short_lengths() -> list[str]:
    """CUDA graphs at 8K tokens on two GPUs."""
    cells: list[tuple[str, Heads]] = [
        ("11-22-2xh200-8k-flash4", (32, 32)), ("11-22-2xh200-cuda-graph-flash4", (32, 8)), (FEW2, (32, 1)),
        ("11-22-2xh200-cuda-graph-flash4", (33, 33)), ("11-22-2xh200-8k-flash4", (2, 2)),
    ]  # fmt: skip
    lines = [
        [label, *(speed(name, method, heads, 8) for name, heads in cells)]
        for label, method in (("ours, `cuda_graph`", GRAPH), ("ours", OURS), ("Ulysses", ULYSSES))
    ]
    return table(["8K tokens", *(f"{h} on {kv}" for _, (h, kv) in cells)], bold(lines, range(1, 6)))


def schedules() -> list[str]:
    """Our schedules on two, four and eight GPUs."""
    files = {2: "11-22-2xh200-schedules-flash4", 4: "11-21-4xh200-schedules-flash4", 8: "11-22-8xh200-schedules-flash4"}
    lines = []
    for label, schedule in (
        ("`balanced_shared`, the default", "balanced_shared"),
        ("`balanced`, as published", "balanced"),
        ("`ring`", "ring"),
        ("layout `zigzag`", "zigzag"),
    ):
        cells = [speed(f, f"dfa {schedule} flash4", (32, 32), n) for f in files.values() for n in (32, 128)]
        lines.append([label, *cells])
    return table(["", *(f"{p} GPUs, {n}K" for p in files for n in (32, 128))], bold(lines, range(1, 7)))


def eight() -> list[str]:
    """Eight GPUs at 32K tokens, 4K for each."""
    name, chosen = "11-22-8xh200-peers-flash4", [one for one in NAMES if one[1] not in (DEEPSPEED, YUNCHANG, RING)]
    lines = [[label, *(speed(name, m, (32, kv), 32) for kv in (32, 8))] for label, m in chosen]
    return table(["eight GPUs, 32K tokens", "kv 32", "kv 8"], bold(lines, (1, 2)))


def transports() -> list[str]:
    """Copy engines, NCCL, and what messages cost."""
    name = "11-21-4xh200-ablations-flash4"
    lines = []
    for transport, words in (("copy engines", "copy_engine"), ("NCCL", "p2p")):
        for label, ablation in (
            ("overlapped", ""), ("not overlapped", " no_overlap"), ("nothing sent", " no_communication"),
        ):  # fmt: skip
            method = f"dfa balanced_shared flash4 {words}{ablation}"
            lines.append([f"{transport}, {label}", *(speed(name, method, (32, 32), n) for n in (32, 128))])
    return table(["four GPUs", "32K", "128K"], lines)


def degrees() -> list[str]:
    """Ulysses around the schedule, with the direct link and without."""
    files = {"NVLink": "11-21-4xh200-ulysses-flash4", "no direct link": "11-22-4xh200-p2p-off-degrees-flash4"}
    lines = [
        [
            str(degree),
            *(speed(f, OURS + suffix, (32, kv), n) for f in files.values() for n in (32, 128) for kv in (32, 8)),
        ]
        for degree, suffix in ((1, ""), (2, " ulysses2"), (4, " ulysses4"))
    ]
    head = ["`ulysses_degree`", *(f"{link}, {n}K, kv {kv}" for link in files for n in (32, 128) for kv in (32, 8))]
    return table(head, bold(lines, range(1, 9)))


def without_link() -> list[str]:
    """Without the direct link."""
    files = {
        4: ("11-21-4xh200-p2p-off-flash4", "11-22-4xh200-p2p-off-heads-flash4"),
        2: ("11-22-2xh200-p2p-off-flash4", "11-22-2xh200-p2p-off-heads-flash4"),
    }
    lines: list[Line] = []
    for gpus, (usual, heads) in files.items():
        cells = [(usual, (32, 32)), (usual, (32, 8)), (heads, (32, 1)), (heads, (33, 33))]
        rows = [
            [label, *(speed(name, method, shape, n) for n in (32, 128) for name, shape in cells)]
            for label, method in (
                ("ours", OURS),
                ("ours, layout `zigzag`", "dfa zigzag flash4"),
                ("Ulysses", ULYSSES),
                ("PyTorch", PYTORCH),
            )
        ]
        lines += [[f"{gpus} GPUs" if not at else "", *one] for at, one in enumerate(bold(rows, range(1, 9)))]
    shapes = ("32 on 32", "32 on 8", "32 on 1", "33 on 33")
    return table(["", "method", *(f"{n}, {shape}" for n in ("32K", "128K") for shape in shapes)], lines)


def bare_kernel() -> list[str]:
    """One GPU: our call beside the kernel that it calls."""
    name = "11-21-1xh200-one-gpu-flash4"
    lines = [
        [
            label,
            *(
                f"{_attention(name, m, (32, 32), n)[0][key]:.0f}"
                for n in (8, 32)
                for key in ("forward_tflops", "both_tflops")
            ),
        ]
        for label, m in (("our call", OURS), ("`flash4` alone", "kernel flash4"))
    ]
    return table(["one GPU", "8K, forward", "forward and backward", "32K, forward", "forward and backward"], lines)


def delta_or_out() -> list[str]:
    """Bytes of a helped rank's backward."""
    name = "11-21-4xh200-payload-flash4"
    lines = []
    for kv in (32, 8):
        sent = {
            p: row(name, payload=p, kv_heads=kv, seq_length=128 * K)["backward_mib_sent_most"] for p in ("delta", "out")
        }
        lines.append(
            [str(kv), f"{sent['delta']:,.0f}", f"{sent['out']:,.0f}", f"{1 - sent['delta'] / sent['out']:.0%}"]
        )
    return table(["kv heads, 128K tokens", "MiB sent with delta", "MiB sent with out", "less"], lines)


# Packed documents.


def packed() -> list[str]:
    """Packed documents on two and four GPUs."""
    names = {2: "11-22-2xh200-packed", 4: "11-22-4xh200-packed"}
    methods = (
        ("ours, `greedy`", "dfa greedy auto auto"),
        ("ours, `auto`", "dfa auto auto auto"),
        ("ours, layout `load_balanced`", "dfa dealt auto auto"),
        ("ring-flash-attn, `llama3`", "ring-flash-attn llama3 varlen"),
        ("ring-flash-attn, `ring`", "ring-flash-attn ring varlen"),
        ("ring-flash-attn, `zigzag`", "ring-flash-attn zigzag varlen"),
    )
    lines = []
    for label, method in methods:
        cells = []
        for name in names.values():
            there = [one for one in results(name)["rows"] if one["method"] == method]
            cells += [f"{there[0][key]:.2f}" if there else "not run" for key in ("forward ms", "both ms")]
        lines.append([label, *cells])
    head = [
        "ms of the slowest rank",
        "2 GPUs, forward",
        "forward and backward",
        "4 GPUs, forward",
        "forward and backward",
    ]
    return table(head, bold(lines, range(1, 5), min))


def new_packs() -> list[str]:
    """Host time of a pack seen for the first time."""
    name = "11-22-4xh200-packed"
    lines = [
        [label, f"{row(name, method=method)['both ms']:.1f}", f"{row(name, method=method)['new pack ms']:.0f}"]
        for label, method in (("`auto`", "dfa auto auto auto"), ("`load_balanced`", "dfa dealt auto auto"))
    ]
    return table(["four GPUs", "ms of a forward and backward", "ms more on the host for a new pack"], lines)


# Megatron-Core.

LAYERS2, LAYERS4 = "11-22-2xh200-megatron-layers", "11-22-4xh200-megatron-layers"
MODES = {
    "remat": "ours, rematerialization",
    "remat-boundary": "the same, layout `boundary`",
    "remat-te": "the same, among Transformer Engine's modules",
    "remat-te-fp8": "the same, its linear layers in fp8",
    "full": "ours, Megatron's full recomputation",
    "te-full": "Transformer Engine's p2p, full recomputation",
    "none": "ours, no recomputation",
    "te": "Transformer Engine's p2p, no recomputation",
}


def layers() -> list[str]:
    """Milliseconds and memory of a Megatron layer."""
    lines = []
    for mode, label in MODES.items():
        cells = []
        for name, groups, length in ((LAYERS2, 8, 128), (LAYERS4, 8, 64), (LAYERS4, 8, 128), (LAYERS4, 32, 128)):
            where = {"mode": mode, "length": length * K, "groups": groups}
            there = any(one["mode"] == mode for one in results(name)["layers"])
            found = row(name, **where) if there else None
            cells.append(f"{found['ms_per_layer']:.0f} ({found['peak_gib']:.1f})" if found else "not run")
        lines.append([label, *cells])
    head = ["ms of a layer (peak, GiB)", "2 GPUs, 128K", "4 GPUs, 64K", "4 GPUs, 128K", "4 GPUs, 128K, Llama-7B"]
    return table(head, lines)


def megatron_training() -> list[str]:
    """Whole training steps."""
    runs = (
        (2, "11-22-2xh200-megatron-training-256k", (
            ("remat", 128, 4), ("full", 128, 4), ("none", 128, 4), ("remat", 256, 2))),
        (4, "11-22-4xh200-megatron-training", (
            ("remat", 128, 4), ("remat-boundary", 128, 4), ("full", 128, 4), ("te-full", 128, 4), ("none", 128, 4),
            ("te", 128, 4), ("remat", 256, 4), ("remat", 512, 2))),
        (4, "11-22-4xh200-megatron-training-1m", (("remat", 32, 4), ("remat", 1024, 2))),
    )  # fmt: skip
    lines = []
    for gpus, name, cells in runs:
        for mode, length, deep in cells:
            found = row(name, mode=mode, length=length * K, num_layers=deep)
            label = MODES[mode].replace("the same", "ours, rematerialization")
            numbers = (
                f"{found['tokens_per_second_per_gpu']:,.0f}",
                f"{found['tflops_per_gpu']:.0f}",
                f"{found['peak_gib']:.1f}",
            )
            lines.append([str(gpus), f"{length}K", str(deep), label, *numbers])
    return table(["GPUs", "tokens", "layers", "", "tokens/s per GPU", "TFLOP/s per GPU", "GiB"], lines)


def losses() -> list[str]:
    """Differences of losses from PyTorch's attention on one rank."""
    mean = results("11-22-2xh200-megatron-loss")["summary"]["mean_difference"]
    lines = [[label, f"{mean[key]:.3f}"] for label, key in (
        ("ours on two ranks, rematerialization", "ours, 2 ranks"), ("ours on one rank", "ours, 1 rank"),
        ("another seed, PyTorch's attention", "two seeds"),
    )]  # fmt: skip
    return table(["50 steps beside PyTorch's attention on one rank", "mean difference of the loss"], lines)


def main_job() -> list[str]:
    """The main job on one, two and four GPUs."""
    labels = {
        (1, ""): "1 GPU", (1, "--seed 2"): "1 GPU, another seed", (2, ""): "CP 2", (4, ""): "CP 4",
        (4, "--dfa-layout boundary"): "CP 4, layout `boundary`",
        (4, "--dfa-remat off"): "CP 4, Megatron's full recomputation",
        (4, "--tensor-model-parallel-size 2 --sequence-parallel"): "TP 2 x CP 2, other initial weights",
    }  # fmt: skip
    lines = []
    for (ranks, arguments), label in labels.items():
        found = row("11-21-4xh200-train", ranks=ranks, arguments=arguments)
        forwards = f"{found['attention_forwards_per_layer_and_micro_batch']:.0f}"
        lines.append([label, f"{found['final_loss']:.3f}", f"{found['tokens_per_second_last']:,}", forwards])
    return table(["", "final loss", "tokens/s", "attention forwards per layer and micro-batch"], lines)


# DeepSpeed.

NO_REMAT4 = "11-22-4xh200-deepspeed-training-no-remat"
FORMS = {
    "dfa-remat": "ours, `remat`",
    "ulysses-full": "DeepSpeed's Ulysses, full checkpointing",
    "dfa-none": "ours, none",
    "ulysses-none": "DeepSpeed's Ulysses, none",
}


def zero(name: str, method: str, length: int, shape: str = "llama-3-8b") -> float:
    """Return tokens per second and GPU, or 0 where the method did not run."""
    return float(row(name, shape=shape, method=method, length=length * K).get("tokens_per_second_per_gpu", 0))


def deepspeed() -> list[str]:
    """Training with ZeRO-3."""
    runs = (("4", NO_REMAT4), ("2", "11-22-2xh200-deepspeed-training-no-remat"))
    lines = []
    for gpus, name in runs:
        shapes = (
            {"llama-3-8b": "Llama-3-8B", "qwen2.5-7b": "Qwen2.5-7B"} if gpus == "4" else {"llama-3-8b": "Llama-3-8B"}
        )
        for shape, label in shapes.items():
            rows = []
            for method, form in FORMS.items():
                gib = f"{row(name, shape=shape, method=method, length=128 * K)['peak_gib']:.1f}"
                speeds = (f"{zero(name, method, n, shape):,.0f}" for n in (32, 64, 128))
                rows.append([f"{gpus} GPUs, {label}", form, *speeds, gib])
            lines += bold(rows, (2, 3, 4))
    return table(["", "", "32K", "64K", "128K", "GiB at 128K"], lines)


def odd_heads() -> list[str]:
    """33 heads, which Ulysses does not divide."""
    name = "11-22-4xh200-deepspeed-training"
    cells = [zero(name, "dfa-remat", n, "33-heads") for n in (32, 64, 128)]
    return table(
        ["four GPUs, 33 heads", "32K", "64K", "128K"],
        [["ours, `remat`", *(f"{one:,.0f}" for one in cells)], ["DeepSpeed's Ulysses", *["cannot"] * 3]],
    )


def qwen() -> list[str]:
    """A whole Qwen3-4B."""
    lines = []
    for gpus, name in ((2, "11-22-2xh200-deepspeed-qwen3-4b"), (4, "11-22-4xh200-deepspeed-qwen3-4b")):
        ours, theirs = (row(name, method=m) for m in ("dfa-remat", "ulysses-full"))
        cells = [f"{one['tokens_per_second_per_gpu']:,.0f} ({one['peak_gib']:.1f})" for one in (ours, theirs)]
        lines.append([f"{gpus} GPUs", *cells, ratio(ours["tokens_per_second"], theirs["tokens_per_second"])])
    return table(["tokens/s per GPU (GiB)", "ours, `remat`", "Ulysses, full checkpointing", "times"], lines)


def longest() -> list[str]:
    """Seconds of a step of one layer at a million tokens and more."""
    runs = (
        ("768K", "1", "11-22-1xh200-deepspeed-longest-768k", "11-22-1xh200-deepspeed-longest-768k-alst", 768),
        ("1M", "2", "11-22-2xh200-deepspeed-longest-1m", "11-22-2xh200-deepspeed-longest-1m", 1024),
        ("1.5M", "2", "11-22-2xh200-deepspeed-longest-1.5m", "11-22-2xh200-deepspeed-longest-1.5m", 1536),
        ("2M", "4", "11-22-4xh200-deepspeed-longest-2m", "11-22-4xh200-deepspeed-longest-2m", 2048),
        ("3M", "4", "11-22-4xh200-deepspeed-longest-3m", "11-22-4xh200-deepspeed-longest-3m-alst", 3072),
    )
    lines = []
    for tokens, gpus, ours, theirs, length in runs:
        cells = []
        for name, method in ((ours, "dfa-remat"), (theirs, "ulysses-full")):
            found = row(name, method=method, length=length * K)
            took = found.get("seconds_per_step")
            cells.append(f"{took:.1f} ({found['peak_gib']:.1f})" if took else "did not end in time")
        lines.append([tokens, gpus, *cells])
    return table(["tokens", "GPUs", "ours, s per step (GiB)", "ALST, s per step (GiB)"], lines)


# Kernels, and the watcher.


def kernels() -> list[str]:
    """Block kernels on one GPU."""
    name = "11-21-1xh200-kernels"
    lines = []
    for length, form, dim, kv in (
        (32, "causal", 128, 32), (32, "full", 128, 32), (32, "causal", 128, 8), (32, "causal", 64, 32),
        (4, "causal", 128, 32), (4, "full", 128, 32),
    ):  # fmt: skip
        cells = []
        for kernel in ("flash4", "cudnn", "triton", "aten"):
            where = {"kernel": kernel, "seq": length * K, "form": form, "head_dim": dim, "kv": kv}
            there = [one for one in results(name)["rows"] if all(one[k] == v for k, v in where.items())]
            cells.append(f"{there[0]['forward']:.0f} / {there[0]['backward']:.0f}" if there else "not run")
        lines.append([f"{length}K, {form}, {dim}, {kv}", *cells])
    return table(["length, mask, head_dim, kv heads", "flash4", "cudnn", "triton", "aten"], lines)


def verify_cost() -> list[str]:
    """Host time of comparing calls."""
    lines = [
        [label, f"{row('11-22-2xh200-verify', transport=name)['more_ms']:.2f}"]
        for label, name in (("NCCL", "p2p"), ("copy engines", "copy_engine"))
    ]
    return table(["two GPUs, 8K tokens", "ms more for a forward and backward"], lines)


def readme() -> list[str]:
    """The README's table of results."""
    lines = []
    for label, methods in (
        ("ours, the faster, with or without `cuda_graph`", (OURS, GRAPH)),
        ("Ulysses all-to-all, the same kernel", ULYSSES),
        ("PyTorch `context_parallel`", PYTORCH),
    ):
        cells = [speed(GRID, methods, (32, 32), n) for n in (8, 32, 128)] + [speed(GRID, methods, (33, 33), 128)]
        lines.append([label, *cells])
    return table(["TFLOP/s per GPU", "8K", "32K", "128K", "128K, 33 heads"], bold(lines, range(1, 5)))


PAGES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "README.md": {"results": readme},
    "docs/performance.md": {
        "in-short": in_short, "grid": grid, "everything-four": everything_four, "everything-two": everything_two,
        "half-a-million": half_a_million, "short-lengths": short_lengths, "eight": eight, "schedules": schedules,
        "transports": transports, "delta-or-out": delta_or_out, "degrees": degrees, "without-link": without_link,
        "bare-kernel": bare_kernel, "packed": packed, "layers": layers, "megatron-training": megatron_training,
        "losses": losses, "main-job": main_job, "deepspeed": deepspeed, "odd-heads": odd_heads, "qwen": qwen,
        "longest": longest,
    },
    "docs/packed.md": {"new-packs": new_packs},
    "docs/kernels.md": {"speed": kernels},
    "docs/trust.md": {"verify-cost": verify_cost},
}  # fmt: skip
"""The tables of each page, by the name between its marks."""
