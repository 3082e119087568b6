"""The table of the longest sequences that the memory account foresees for whole models."""

from __future__ import annotations

from functools import cache

from benchmarks.deepspeed_memory import Step
from benchmarks.deepspeed_shapes import SHAPES
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.plan.lowering.lower import lower_all
from docs.raw_results import Lines, table

RANKS = 8
FREE = 8
"""GiB of a GPU that are left for CUDA, NCCL and fragments."""
GPUS = {"80 GB": 79, "141 GB": 140}
"""GiB that such a GPU has."""
ROWS = 2**14
"""Tokens of a rank for which the bytes of messages are counted; they grow with the tokens."""
UNIT = 2**17
"""Tokens of the whole sequence to which a length is rounded down."""


def longest() -> Lines:
    """Return the longest sequences of whole models on eight GPUs, and their host memory."""
    lines = []
    for model, label in (("llama-3-8b", "Llama-3-8B"), ("qwen3-4b", "Qwen3-4B")):
        for gpu, gib in GPUS.items():
            step = step_of(model)
            rows = step.longest(gib - FREE, UNIT // RANKS)
            cell = f"{rows * RANKS / 1e6:.1f}M ({step.host_gib(rows) / 1024:.2f})"
            lines.append([f"{label}, {RANKS} x {gpu}", cell])
    return table(["model, GPUs", "tokens (TiB of host memory a GPU)"], lines)


@cache
def step_of(model: str) -> Step:
    """Return the step of a whole model with everything that saves memory."""
    shape = SHAPES[model]
    attention = AttentionShape(1, shape.heads, shape.kv_heads, shape.head_dim)
    messages = message_bytes(make_plan(causal(RANKS * ROWS), RANKS, shape=attention), attention) // ROWS
    return Step(
        shape=shape, layers=shape.layers, vocabulary=shape.vocabulary, tile=4096, ranks=RANKS,
        on_host=True, stages=shape.kv_heads, messages=messages,
    )  # fmt: skip


def message_bytes(plan: AttentionPlan, shape: AttentionShape) -> int:
    """Return the most bytes of a rank's slots over both phases; a slot counts as a whole chunk."""
    most = 0
    for one in plan.phases:
        tokens = max(len(chunk) for chunk in one.layout.chunks)
        for program in lower_all(one, shape.batch):
            slots = program.peak_slots().items()
            most = max(most, sum(count * bytes_of(name, tokens, shape) for name, count in slots))
    return most
