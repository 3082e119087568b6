"""The shapes of transformers models, and the methods of the DeepSpeed benchmarks; without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


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
    layers: int = 32
    """Of the whole model."""
    vocabulary: int = 128256

    def config(self, longest: int) -> Any:
        """Return the configuration of a model of transformers, with PyTorch's own attention."""
        import transformers

        return getattr(transformers, f"{self.family}Config")(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=longest,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            tie_word_embeddings=self.tied,
            attn_implementation="sdpa",
            use_cache=False,
        )

    def model(self, longest: int) -> Any:
        """Return a new model, on PyTorch's default device."""
        import transformers

        return getattr(transformers, f"{self.family}ForCausalLM")(self.config(longest))

    def toy(self) -> Shape:
        """Return a tiny one with the same relations between its heads."""
        kv_heads = max(2, self.kv_heads // 4) if self.kv_heads < self.heads else 3
        heads = kv_heads * (self.heads // self.kv_heads)
        hidden = heads * 8 * self.hidden // (self.heads * self.head_dim)
        return replace(self, hidden=hidden, intermediate=32, heads=heads, kv_heads=kv_heads, head_dim=8)


SHAPES = {
    "llama-3-8b": Shape(4096, 14336, 32, 8),
    "qwen2.5-7b": Shape(3584, 18944, 28, 4, layers=28, vocabulary=152064),
    "33-heads": Shape(4224, 11264, 33, 33),
    "qwen3-4b": Shape(2560, 9728, 32, 8, family="Qwen3", theta=1e6, tied=True, layers=36, vocabulary=151936),
    "qwen3-8b": Shape(4096, 12288, 32, 8, family="Qwen3", theta=1e6, layers=36, vocabulary=151936),
}


@dataclass(frozen=True)
class Method:
    """Attention and checkpointing of the layers."""

    attention: str
    """dfa, ulysses, or local: whole sequences on every rank."""
    checkpoint: str
    on_host: bool = False
    """What a checkpoint keeps: `remat_offload`, or DeepSpeed's cpu_checkpointing. The latter needs a GPU."""


METHODS = {
    "dfa-remat": Method("dfa", "remat"),
    "ulysses-full": Method("ulysses", "full"),
    "dfa-full": Method("dfa", "full"),
    "dfa-none": Method("dfa", "none"),
    "ulysses-none": Method("ulysses", "none"),
    "dfa-remat-host": Method("dfa", "remat", on_host=True),
    "ulysses-full-host": Method("ulysses", "full", on_host=True),
}
"""In the order in which time is spent on them."""
