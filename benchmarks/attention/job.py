"""What a benchmark is asked to measure: the attentions, their lengths, and the presets; without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dfa_megatron.errors import UnsupportedError

MASKS = ("causal", "full", "window")
DTYPES = ("bfloat16", "float16", "float32", "float64")
PEERS = ("pytorch", "ulysses", "deepspeed", "ring_flash_attn", "yunchang", "transformer_engine")
"""Modules of `benchmarks.attention.baselines`."""
INSTALLED = "installed"
"""In place of peers' names: those that run here."""
ABLATIONS = ("none", "no_overlap", "no_communication")
"""As in `dfa_megatron.doctor.ablation`, which needs PyTorch."""
PASSES = ("forward", "both")
"""`both` is a forward and its backward."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention, whatever its length; batch is 1."""

    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    window: int
    """Tokens that a token sees before itself, for the mask "window"."""
    dtype: str

    @property
    def window_size(self) -> tuple[int, int]:
        """As flash-attn takes it."""
        return (self.window, 0) if self.mask == "window" else (-1, -1)

    @property
    def causal(self) -> bool:
        """Whether a token sees nothing after itself."""
        return self.mask != "full"

    def flops(self, length: int) -> float:
        """Of a forward over the whole sequence: two matrix products over the mask's pairs (half of all if causal)."""
        pairs = float(length) ** 2
        if self.mask == "causal":
            pairs /= 2
        elif self.mask == "window" and self.window < length:
            pairs = (self.window + 1) * length - self.window * (self.window + 1) / 2
        return 4.0 * pairs * self.heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.heads}:{self.kv_heads}x{self.head_dim} {self.mask}"


BACKWARD_FLOPS = 2.5
"""Of a backward, in forwards, whatever a kernel computes twice."""

FLOPS_OF = {"forward": 1.0, "both": 1.0 + BACKWARD_FLOPS}


@dataclass(frozen=True, slots=True)
class Job:
    """A whole run: every problem at every length by every method. Names are those of the flags."""

    seq_length: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    """(heads, kv_heads) of each problem."""
    head_dim: int = 128
    mask: tuple[str, ...] = ("causal",)
    window: int = 4096
    dtype: str = "bfloat16"
    schedule: tuple[str, ...] = ("auto",)
    kernel: tuple[str, ...] = ("auto",)
    transport: tuple[str, ...] = ("auto",)
    ablation: tuple[Any, ...] = ("none",)
    ulysses_degree: tuple[int, ...] = (1,)
    cuda_graph: tuple[bool, ...] = (False,)
    peers: tuple[str, ...] = ()
    passes: tuple[str, ...] = PASSES
    repetitions: int = 5
    seconds: float = 0.3
    budget: float = 0.0
    """Seconds for all; 0 is no limit."""
    out: str = ""
    device: str = "cpu"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every attention to measure."""
        return tuple(
            Problem(heads, kv_heads, self.head_dim, mask, self.window, self.dtype)
            for mask in self.mask
            for heads, kv_heads in self.heads
        )

    @property
    def cells(self) -> tuple[tuple[Problem, int], ...]:
        """Every (problem, length), short ones first: what runs out of memory or time comes last."""
        return tuple((problem, length) for length in sorted(set(self.seq_length)) for problem in self.problems)


K = 1024
PRESETS: dict[str, dict[str, tuple[object, ...]]] = {
    "toy": {"seq_length": (256, 512), "heads": (4,), "kv_heads": (4, 2), "head_dim": (32,)},
    "quick": {"seq_length": (32 * K, 128 * K), "heads": (32,), "kv_heads": (32, 8)},
    "grid": {
        "seq_length": (8 * K, 32 * K, 64 * K, 128 * K, 512 * K),
        "heads": (32, 32, 32, 33, 2),
        "kv_heads": (32, 8, 1, 33, 2),
    },
    "short": {"seq_length": (8 * K, 32 * K, 64 * K), "heads": (32, 32, 32, 33, 2), "kv_heads": (32, 8, 1, 33, 2)},
    "schedules": {
        "seq_length": (8 * K, 32 * K, 128 * K),
        "heads": (32,),
        "kv_heads": (32, 8),
        "schedule": ("balanced_shared", "zigzag", "balanced", "ring"),
    },
    "ablations": {
        "seq_length": (32 * K, 128 * K),
        "heads": (32,),
        "kv_heads": (32,),
        "schedule": ("balanced_shared", "balanced", "ring"),
        "ablation": ("none", "no_overlap", "no_communication"),
    },
    "transports": {
        "seq_length": (8 * K, 32 * K, 128 * K),
        "heads": (32,),
        "kv_heads": (32, 8),
        "transport": ("p2p", "copy_engine"),
    },
    "one_gpu": {"seq_length": (4 * K, 8 * K, 32 * K, 64 * K), "heads": (32,), "kv_heads": (32, 8, 1)},
}
"""Flags by name; a flag that is given goes before its preset."""


def head_pairs(heads: Sequence[int], kv_heads: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    """(heads, kv_heads) of every problem: one after another where there are as many of both, else every combination.

    Raises:
        UnsupportedError: kv_heads does not divide heads.
    """
    if kv_heads is None:
        pairs = [(count, count) for count in heads]
    elif len(heads) == len(kv_heads):
        pairs = list(zip(heads, kv_heads, strict=True))
    else:
        pairs = [(count, kv_count) for count in heads for kv_count in kv_heads]
    for count, kv_count in pairs:
        if count < 1 or kv_count < 1 or count % kv_count:
            raise UnsupportedError(
                f"{count} heads with {kv_count} kv_heads",
                "heads must be a multiple of kv_heads",
                "as many --heads as --kv-heads, which are then taken in pairs, or one --heads that all divide",
            )
    return tuple(dict.fromkeys(pairs))
