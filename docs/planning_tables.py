"""The tables of planning.md: memory, lengths and networks, computed; measured errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.deepspeed_memory import Step, kept, parameters, recomputed
from benchmarks.head_memory import head_bytes
from dfa_megatron.plan.cost.choose import best, candidates
from dfa_megatron.plan.cost.hardware import H200_NIC_400G, Link, computing_with
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape
from docs.attention_tables import ALL, OURS, PEERS, PYTORCH, SOME, TE_RING, ULYSSES, rows_of
from docs.longest_table import FREE, GPUS, UNIT, step_of
from docs.raw_results import K, Lines, table

MODEL = "llama-3-8b"
RANKS = (4, 8, 16, 32)
EXAMPLE = K * K
"""Tokens of the worked example."""


def base() -> Step:
    """Return a step of the whole model with rematerialization and a tiled loss; messages are those of 8 ranks."""
    step = step_of(MODEL)
    return replace(step, on_host=False, offload=False, stages=1)


def account() -> Lines:
    """Return the parts of the worked example, GiB of a rank."""
    step = base()
    shape, rows = step.shape, {ranks: EXAMPLE // ranks for ranks in RANKS}
    state = 16 * parameters(shape, step.layers, step.vocabulary)
    head = {n: head_bytes(rows[n], step.vocabulary, shape.hidden, step.tile).together for n in RANKS}
    parts: dict[str, Callable[[int], float]] = {
        "weights, gradients, Adam: 16 N / P": lambda n: state / n,
        "kept by layers: L T (4 h + 4 heads)": lambda n: step.layers * rows[n] * kept(shape),
        "the layer in its backward: 41 h T": lambda n: rows[n] * max(recomputed(shape).values()),
        "messages of attention: 12 h T": lambda n: rows[n] * step.messages,
        "loss by tiles of 4096, when no layer runs": lambda n: head[n],
    }
    lines = [[label, *(f"{part(n) / 2**30:.1f}" for n in RANKS)] for label, part in parts.items()]
    peaks = [replace(step, ranks=n).peak(rows[n]) for n in RANKS]
    lines.append(["**peak, by the whole account**", *(f"**{peak:.0f}**" for peak in peaks)])
    return table([f"GiB of a rank, {EXAMPLE // K // K}M tokens", *(f"{n} GPUs" for n in RANKS)], lines)


def fits() -> Lines:
    """Return the longest sequence that the account foresees, by what is switched on."""
    steps = {
        "`remat`, `loss_tile`": base(),
        "and `remat_offload`": replace(base(), on_host=True),
    }
    lines = []
    for gpu, gib in GPUS.items():
        for label, step in steps.items():
            cells = [replace(step, ranks=n).longest(gib - FREE, UNIT // n) * n / 1e6 for n in RANKS]
            lines.append([f"{gpu}: {label}", *(f"{cell:.1f}M" for cell in cells)])
    return table(["tokens of the whole sequence", *(f"{n} GPUs" for n in RANKS)], lines)


def network() -> Lines:
    """Return the share of the time in which two hosts of eight GPUs compute nothing, by the rate of the network."""
    shape = AttentionShape(kv_heads=8, backward_needs="delta")
    lines = []
    for gigabits in (400, 200, 100, 25):
        link = Link("p2p", 0.9e9 * gigabits / 8, 30e-6)
        hardware = computing_with("flash4", replace(H200_NIC_400G, network=link))
        cells = []
        for tokens in (4, 8, 16, 32, 64):
            about = {"layout": "contiguous", "shape": shape, "hardware": hardware, "degrees": True}
            found = best(candidates(causal(16 * K * tokens), 16, **about))
            assert found is not None
            cells.append(f"{100 * (1 - found.busy / found.device):.0f} %")
        lines.append([f"{gigabits} Gb/s", *cells])
    return table(["adapter of each GPU", *(f"{tokens}K a rank" for tokens in (4, 8, 16, 32, 64))], lines)


def errors() -> Lines:
    """Return the largest relative error of out, dq, dk and dv against float64, of methods on four GPUs."""
    methods = {
        "ours, `flash4`": OURS,
        "Ulysses, `flash4`": ULYSSES,
        "Transformer Engine, p2p": TE_RING,
        "PyTorch, all-gather": PYTORCH[:1],
        "ring-flash-attn, zigzag": ("ring-flash-attn zigzag",),
    }
    return table(
        ["bfloat16, four H200", "32 heads on 32", "32 heads on 8"],
        [
            [label, *(f"{rows_of(some, (PEERS, heads, 128))[0]['error']:.4f}" for heads in (ALL, SOME))]
            for label, some in methods.items()
        ],
    )


TABLES = {"account": account, "fits": fits, "network": network, "errors": errors}
