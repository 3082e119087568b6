"""The account of a GPU's memory in a ZeRO-3 step of the longest-sequence benchmark, on one rank; without PyTorch.

Bytes of each token were counted once for every operation of a small model, as multiples of its widths; a test compares
them. Modules are transformers' own in bfloat16, MLP and loss go by tiles, and a layer is recomputed without its
attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfa_megatron.loss.memory import head_bytes

if TYPE_CHECKING:
    from deepspeed_common import Shape

BUCKET = 2 * 500_000_000
"""Bytes of the buffer in which ZeRO-3 reduces gradients; DeepSpeed's default."""
_ALWAYS = 28
"""Bytes of a token: its id, place and label, and a norm's number."""


def parameters(shape: Shape, layers: int, vocabulary: int) -> int:
    """Return the number of a model's parameters."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate + 2)
    layer += 2 * shape.head_dim if _norms_heads(shape) else 0
    return layers * layer + (1 if shape.tied else 2) * vocabulary * shape.hidden + shape.hidden


def kept(shape: Shape) -> int:
    """Return the bytes of a token that a layer keeps until its recompute: its input, attention's output and lse."""
    return 2 * shape.hidden + 2 * shape.heads * shape.head_dim + 4 * shape.heads


def recomputed(shape: Shape, stages: int) -> dict[str, int]:
    """Return the bytes of a token while a layer's backward runs, by moment, with its input and attention's output."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads = 4 * (queries + keys) + 4 * shape.heads  # q, k, v, attention's output, lse
    if _norms_heads(shape):
        heads += 6 * (queries + keys) + 4 * (shape.heads + shape.kv_heads)
    always = 4 * shape.head_dim + _ALWAYS
    found = {
        "the norm before an MLP": 36 * hidden + heads + always,
        "attention": 12 * hidden + heads + 4 * (queries + keys) + (4 * queries + 8 * keys) // stages + always,
    }
    if _norms_heads(shape):
        found["the norm of queries"] = 14 * hidden + 24 * queries + always
    return found


def account(
    shape: Shape, layers: int, vocabulary: int, rows: int, *, on_host: bool, offload: bool, stages: int, tile: int
) -> dict[str, float]:
    """Return the GiB of a rank that is alone, by moment; the largest is its peak.

    Args:
        on_host: what a layer keeps is in host memory, but for the layer that is fetched next.
        offload: optimizer state and gradients are there.
        stages: `head_stages`; attention's float32 gradients are those of a stage.
        tile: tokens of a tile of the loss.
    """
    count = parameters(shape, layers, vocabulary)
    rest = BUCKET + count * (2 if offload else 16)
    waiting = 2 * vocabulary * shape.hidden if shape.tied else 0  # the head's part of the embedding's gradient
    others = rows * kept(shape) * (min(layers - 1, 1) if on_host else layers - 1)
    head = head_bytes(rows, vocabulary, shape.hidden, tile).together
    found = {
        "at rest": rest,
        "the head": rest + others + rows * (kept(shape) + 10 * shape.hidden + 4 * shape.head_dim + _ALWAYS) + head,
        "the optimizer": rest + (0 if offload else 4 * count),
    }
    found |= {name: rest + waiting + others + rows * each for name, each in recomputed(shape, stages).items()}
    return {name: nbytes / 2**30 for name, nbytes in found.items()}


def _norms_heads(shape: Shape) -> bool:
    return shape.family == "Qwen3"
