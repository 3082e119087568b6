"""What is computed ahead: the memory of a rank, lengths that fit, and what a network costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from benchmarks.memory_account import Step, head_bytes, kept, parameters, recomputed
from benchmarks.model_shapes import SHAPES
from dfa_megatron.plan.cost.choose import best, candidates, make_plan
from dfa_megatron.plan.cost.hardware import H200_NIC_400G, Link, computing_with
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.lower import lower_all
from docs.measured import K, Lines, table

ONE_HOST, RANKS = 8, (4, 8, 16, 32)
FREE = 8
"""GiB of a GPU that are left for CUDA, NCCL and fragments."""
GPUS = {"80 GB": 79, "141 GB": 140}
"""GiB that such a GPU has."""
ROWS = 2**14
"""Tokens of a rank for which the bytes of messages are counted; they grow with the tokens."""
UNIT = 2**17
"""Tokens of the whole sequence to which a length is rounded down."""
EXAMPLE = K * K
"""Tokens of the worked example."""


@cache
def step_of(model: str) -> Step:
    """Return the step of a whole model on eight GPUs with everything that saves memory."""
    shape = SHAPES[model]
    attention = Sizes(1, shape.heads, shape.kv_heads, shape.head_dim)
    messages = message_bytes(make_plan(causal(ONE_HOST * ROWS), ONE_HOST, sizes=attention), attention) // ROWS
    return Step(
        shape=shape, layers=shape.layers, vocabulary=shape.vocabulary, tile=4096, ranks=ONE_HOST,
        on_host=True, stages=shape.kv_heads, messages=messages,
    )  # fmt: skip


def message_bytes(plan: AttentionPlan, shape: Sizes) -> int:
    """Return the most bytes of a rank's slots over both phases; a slot counts as a whole chunk."""
    most = 0
    for one in plan.phases:
        tokens = max(len(chunk) for chunk in one.layout.chunks)
        for program in lower_all(one, shape.batch):
            slots = program.peak_slots().items()
            most = max(most, sum(count * tokens * sum(shape.row_bytes(name)) for name, count in slots))
    return most


def base() -> Step:
    """Return the step of Llama-3-8B with rematerialization and a tiled loss."""
    return replace(step_of("llama-3-8b"), on_host=False, offload=False, stages=1)


def longest() -> Lines:
    """Return the longest sequences of whole models on eight GPUs, and their host memory."""
    lines = []
    for model, label in (("llama-3-8b", "Llama-3-8B"), ("qwen3-4b", "Qwen3-4B")):
        for gpu, gib in GPUS.items():
            step = step_of(model)
            rows = step.longest(gib - FREE, UNIT // ONE_HOST)
            cell = f"{rows * ONE_HOST / 1e6:.1f}M ({step.host_gib(rows) / 1024:.2f})"
            lines.append([f"{label}, {ONE_HOST} x {gpu}", cell])
    return table(["model, GPUs", "tokens (TiB of host memory a GPU)"], lines)


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
    steps = {"`remat`, `loss_tile`": base(), "and `remat_offload`": replace(base(), on_host=True)}
    lines = []
    for gpu, gib in GPUS.items():
        for label, step in steps.items():
            cells = [replace(step, ranks=n).longest(gib - FREE, UNIT // n) * n / 1e6 for n in RANKS]
            lines.append([f"{gpu}: {label}", *(f"{cell:.1f}M" for cell in cells)])
    return table(["tokens of the whole sequence", *(f"{n} GPUs" for n in RANKS)], lines)


def network() -> Lines:
    """Return the share of the time in which two hosts of eight GPUs compute nothing, by the rate of the network."""
    shape, lengths, lines = Sizes(kv_heads=8, backward_needs="delta"), (4, 8, 16, 32, 64), []
    for gigabits in (400, 200, 100, 25):
        link = Link(0.9e9 * gigabits / 8, 30e-6)
        hardware = computing_with("flash4", replace(H200_NIC_400G, network=link))
        about = {"layout": "contiguous", "sizes": shape, "hardware": hardware}
        found = [best(candidates(causal(16 * K * tokens), 16, **about)) for tokens in lengths]
        lines.append([f"{gigabits} Gb/s", *(f"{100 * one.cost.idle_share:.0f} %" for one in found if one and one.cost)])
    return table(["adapter of each GPU", *(f"{tokens}K a rank" for tokens in lengths)], lines)


PAGES = {"planning": {"account": account, "fits": fits, "network": network}, "remat": {"longest": longest}}
