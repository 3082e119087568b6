"""Describe a benchmark: the attentions, their lengths, and the presets; without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import flag
from dfa_megatron.names import KERNELS, SCHEDULES, TRANSPORTS

MASKS = ("causal", "full")
DTYPES = ("bfloat16", "float16", "float32", "float64")
BASELINES = (
    "pytorch", "ulysses", "deepspeed", "ring_flash_attn", "yunchang", "transformer_engine", "ringmaster",
    "ring_self_attention", "magi",
)  # fmt: skip
"""Modules of `benchmarks.attention.baselines`."""
INSTALLED = "installed"
"""In place of names: those that run here."""
ABLATIONS = ("none", "no_overlap", "no_communication")
PASSES = ("forward", "both")
"""`both` is a forward and its backward."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention, whatever its length; batch is 1."""

    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    dtype: str

    @property
    def causal(self) -> bool:
        """Return whether a token sees nothing after itself."""
        return self.mask != "full"

    def flops(self, length: int) -> float:
        """Return the FLOP of a forward: two products over the pairs of the mask (half of all if causal)."""
        return (2.0 if self.causal else 4.0) * float(length) ** 2 * self.heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.heads}:{self.kv_heads}x{self.head_dim} {self.mask}"


BACKWARD_FLOPS = 2.5
"""Of a backward, in forwards, whatever a kernel computes twice."""

FLOPS_OF = {"forward": 1.0, "both": 1.0 + BACKWARD_FLOPS}


K = 1024
PRESETS: dict[str, dict[str, Any]] = {
    "toy": {"seq_length": (256, 512), "heads": (4,), "kv_heads": (4, 2), "head_dim": 32},
    "quick": {"seq_length": (32 * K, 128 * K), "heads": (32,), "kv_heads": (32, 8)},
    "grid": {
        "seq_length": (8 * K, 32 * K, 64 * K, 128 * K, 512 * K),
        "heads": (32, 32, 32, 33, 2),
        "kv_heads": (32, 8, 1, 33, 2),
    },
    "automatic": {
        "seq_length": (8 * K, 32 * K, 128 * K),
        "heads": (32, 32, 33, 2),
        "kv_heads": (32, 8, 33, 2),
        "baselines": ("ulysses", "pytorch"),
    },
    "schedules": {
        "seq_length": (8 * K, 32 * K, 128 * K),
        "heads": (32,),
        "kv_heads": (32, 8),
        "schedule": ("balanced_shared", "zigzag", "balanced", "ring"),
        "ulysses_degree": ("1",),
    },
    "ablations": {
        "seq_length": (32 * K, 128 * K),
        "heads": (32,),
        "kv_heads": (32,),
        "schedule": ("balanced_shared", "balanced", "ring"),
        "ulysses_degree": ("1",),
        "ablation": ("none", "no_overlap", "no_communication"),
    },
    "one_gpu": {"seq_length": (4 * K, 8 * K, 32 * K, 64 * K), "heads": (32,), "kv_heads": (32, 8, 1)},
}
"""Flags by name; a flag that is given wins over its preset."""


@dataclass(frozen=True)
class Job:
    """A whole run: every problem at every length by every method."""

    preset: str = flag("", "a set of these flags; the ones given here win over it", choices=tuple(PRESETS))
    ranks: int | None = flag(None, "default: one per GPU, two without GPUs", metavar="N")
    device: str = flag("auto", "where to run", choices=("auto", "cuda", "cpu"))
    seq_length: tuple[int, ...] = flag((32 * K, 128 * K), "tokens of all ranks together", metavar="N")
    heads: tuple[int, ...] = flag((32,), "query heads", metavar="N")
    kv_heads: tuple[int, ...] = flag(
        (), "in pairs with --heads where there are as many; default: the same", metavar="N"
    )
    head_dim: int = flag(128, "of a head", metavar="N")
    mask: tuple[str, ...] = flag(("causal",), "which tokens a token sees", choices=MASKS)
    dtype: str = flag("", "default: bfloat16, float32 on a CPU", choices=DTYPES)
    schedule: tuple[str, ...] = flag(("auto",), "of ours; zigzag: zigzag tokens", choices=(*SCHEDULES, "zigzag"))
    kernel: tuple[str, ...] = flag(("auto",), "of ours, and of the all-to-all baselines", choices=KERNELS)
    transport: tuple[str, ...] = flag(("auto",), "of ours", choices=TRANSPORTS)
    ulysses_degree: tuple[str, ...] = flag(("auto",), "of ours: auto, or ranks that exchange heads", metavar="N")
    ablation: tuple[str, ...] = flag(("none",), "what ours leaves out", choices=ABLATIONS)
    baselines: tuple[str, ...] = flag((), f"some of these, or {INSTALLED}", choices=(INSTALLED, *BASELINES))
    passes: tuple[str, ...] = flag(PASSES, "what is timed", choices=PASSES)
    repetitions: int = flag(5, "at least", metavar="N")
    seconds: float = flag(0.3, "and until this many are spent on a pass", metavar="S")
    budget: float = flag(0.0, "seconds for all; cells that do not fit are named; 0 is no limit", metavar="S")
    out: str = flag("", "folder for the results; default: runs/bench-DATE-TIME", metavar="FOLDER")

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return every attention to measure."""
        dtype = self.dtype or ("bfloat16" if self.device == "cuda" else "float32")
        return tuple(
            Problem(heads, kv_heads, self.head_dim, mask, dtype)
            for mask in self.mask
            for heads, kv_heads in head_pairs(self.heads, self.kv_heads)
        )

    @property
    def cells(self) -> tuple[tuple[Problem, int], ...]:
        """Return every (problem, length), short ones first, so that cells that run out of memory or time come last."""
        return tuple((problem, length) for length in sorted(set(self.seq_length)) for problem in self.problems)


def head_pairs(heads: Sequence[int], kv_heads: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (heads, kv_heads) of every problem: in pairs where there are as many of both, else every combination.

    Raises:
        UnsupportedError: kv_heads does not divide heads.
    """
    if not kv_heads:
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
