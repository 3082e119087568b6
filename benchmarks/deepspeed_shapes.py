"""The model shapes of the DeepSpeed benchmarks; without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    family: str = "Llama"
    theta: float = 500_000.0
    """The base of rotary positions."""
    tied: bool = False
    """Whether embeddings and head are one weight."""

    def toy(self) -> Shape:
        """Return a tiny one with the same relations between its heads."""
        kv_heads = max(2, self.kv_heads // 4) if self.kv_heads < self.heads else 3
        heads = kv_heads * (self.heads // self.kv_heads)
        hidden = heads * 8 * self.hidden // (self.heads * self.head_dim)
        return replace(self, hidden=hidden, intermediate=32, heads=heads, kv_heads=kv_heads, head_dim=8)


SHAPES = {
    "llama-3-8b": Shape(4096, 14336, 32, 8),
    "qwen2.5-7b": Shape(3584, 18944, 28, 4),
    "33-heads": Shape(4224, 11264, 33, 33),
    "qwen3-4b": Shape(2560, 9728, 32, 8, family="Qwen3", theta=1_000_000.0, tied=True),
}
VOCABULARIES = {"llama-3-8b": 128256, "qwen3-4b": 151936}
LAYERS = {"llama-3-8b": 32, "qwen3-4b": 36}
"""Of the whole models."""
