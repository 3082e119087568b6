"""The account of a GPU's memory, of a head and in a ZeRO-3 step of the longest-sequence benchmark; without PyTorch.

Bytes of each token were counted once for every operation of a small model, as multiples of its widths; a test compares
them, and others the peaks that were measured. Modules are transformers' own in bfloat16. The loss goes by tiles, MLPs
by ALST's. A layer is recomputed without its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.model_shapes import Shape

BUCKET = 4 * 500_000_000
"""Bytes of the buffer in which ZeRO-3 reduces gradients, in float32; DeepSpeed's default length."""
_IDS = 16
"""Bytes of a token: its id and its place."""
_LABELS = 12
"""Bytes of a token: its label and a norm's number."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step.

    Attributes:
        ranks: share the sequence and the model.
        on_host: what a layer keeps is in host memory, but for the layer that is fetched next.
        offload: optimizer state and gradients are there.
        stages: parts of the heads that attend one after another; float32 gradients and messages are those of a part.
        tile: tokens of a tile of the loss.
        messages: bytes of a token in attention's messages, of all heads.
    """

    shape: Shape
    layers: int
    vocabulary: int
    tile: int
    ranks: int = 1
    on_host: bool = False
    offload: bool = True
    stages: int = 1
    messages: int = 0

    def account(self, rows: int) -> dict[str, float]:
        """Return the GiB of a rank with so many tokens, by moment; the largest is its peak."""
        shape, count = self.shape, parameters(self.shape, self.layers, self.vocabulary)
        matrix = 2 * self.vocabulary * shape.hidden
        gathered = matrix if self.ranks > 1 else 0  # the embedding, from all ranks
        rest = BUCKET + count * (2 if self.offload else 16) / self.ranks + gathered + rows * self.messages / self.stages
        waiting = matrix if shape.tied else 0  # the gradient of the head waits for the embedding's
        others = rows * kept(shape) * (min(self.layers - 1, 1) if self.on_host else self.layers - 1)
        head = head_bytes(rows, self.vocabulary, shape.hidden, self.tile).together
        at_head = kept(shape) + 10 * shape.hidden + 4 * shape.head_dim + _IDS + _LABELS
        found = {
            "at rest": rest,
            "the head": rest + others + rows * at_head + head,
            "the optimizer": rest + (0 if self.offload else 4 * count / self.ranks),
        }
        moments = recomputed(shape)
        moments["attention"] += of_kernel(shape) // self.stages
        if self.stages > 1:
            moments["attention"] += of_stage(shape, self.stages)
        found |= {name: rest + waiting + others + rows * each for name, each in moments.items()}
        return {name: nbytes / 2**30 for name, nbytes in found.items()}

    def peak(self, rows: int) -> float:
        """Return the GiB of the largest moment."""
        return max(self.account(rows).values())

    def longest(self, gib: float, unit: int = 1024) -> int:
        """Return the most tokens of a rank, a multiple of `unit`, whose peak is at most so many GiB."""
        below, above = 0, 2**20
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if self.peak(middle * unit) <= gib else (below, middle)
        return below * unit

    def host_gib(self, rows: int) -> float:
        """Return the GiB in a rank's host memory: what layers keep, and the optimizer's state."""
        held = rows * kept(self.shape) * self.layers if self.on_host else 0
        state = 16 * parameters(self.shape, self.layers, self.vocabulary) / self.ranks if self.offload else 0
        return (held + state) / 2**30


def parameters(shape: Shape, layers: int, vocabulary: int) -> int:
    """Return the number of a model's parameters."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate + 2)
    layer += 2 * shape.head_dim if _norms_heads(shape) else 0
    return layers * layer + (1 if shape.tied else 2) * vocabulary * shape.hidden + shape.hidden


def kept(shape: Shape) -> int:
    """Return the bytes of a token that a layer keeps until its recompute: its input, attention's output and lse."""
    return 2 * shape.hidden + 2 * shape.heads * shape.head_dim + 4 * shape.heads


def of_kernel(shape: Shape) -> int:
    """Return the bytes of a token that attention's backward takes inside: its gradients in float32."""
    return 4 * shape.head_dim * (shape.heads + 2 * shape.kv_heads)


def of_stage(shape: Shape, stages: int) -> int:
    """Return the bytes of a token that a stage copies: q, k, v, out, lse, and the gradients of the first four."""
    return (8 * shape.head_dim * (shape.heads + shape.kv_heads) + 4 * shape.heads) // stages


def recomputed(shape: Shape) -> dict[str, int]:
    """Return the bytes of a token while a layer's backward runs, by moment, with its input and attention's output."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads = 4 * (queries + keys) + 4 * shape.heads  # q, k, v, attention's output, lse
    gradients = 4 * (queries + keys)  # of attention's output, q, k and v
    always = 4 * shape.head_dim + _IDS + _LABELS
    if _norms_heads(shape):
        heads += 6 * (queries + keys) + 4 * (shape.heads + shape.kv_heads)
    found = {
        "the norm before an MLP": 36 * hidden + heads + always,
        "attention": 12 * hidden + heads + gradients + always,
    }
    if _norms_heads(shape):
        found["the norm of queries"] = 14 * hidden + 24 * queries + always
    return found


def _norms_heads(shape: Shape) -> bool:
    return shape.family == "Qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMemory:
    """Bytes beside weight and hidden states at the fullest moment of a backward; `tile` has the logits."""

    tile: int
    weight_gradient: int
    hidden_gradient: int
    numbers: int

    @property
    def together(self) -> int:
        """Return their sum."""
        return self.tile + self.weight_gradient + self.hidden_gradient + self.numbers


def head_bytes(
    tokens: int, vocabulary: int, hidden: int, tile: int | None, *, itemsize: int = 2, entropy: bool = False
) -> HeadMemory:
    """Predict the memory of a head's loss and its gradients on one rank, beside weight and hidden states.

    Args:
        tokens: of this rank.
        vocabulary: this rank's rows.
        hidden: the hidden size.
        tile: tokens of a tile; None: the logits of all tokens at once, in float32 beside the model's dtype, and their
            gradient the same. That is Megatron's loss and transformers'.
        itemsize: bytes of an element of weight and hidden states: 2, 4 or 8.
        entropy: it is computed too.
    """
    wide = max(itemsize, 4)
    rounded = itemsize if itemsize < wide else 0  # the logits before they are made wider, or their gradient after
    product = vocabulary * hidden * rounded  # of a tile, added to the wider sum
    if tile is None:
        return HeadMemory(
            tile=tokens * vocabulary * (wide + itemsize),
            weight_gradient=vocabulary * hidden * itemsize,
            hidden_gradient=tokens * hidden * itemsize,
            numbers=0,
        )
    rows = min(tile, tokens)
    widest = wide * (2 if entropy else 1)
    return HeadMemory(
        tile=max(rows * vocabulary * max(wide + rounded, widest), rows * vocabulary * itemsize + product),
        weight_gradient=vocabulary * hidden * wide,
        hidden_gradient=tokens * hidden * itemsize,
        numbers=tokens * wide * 16,
    )
