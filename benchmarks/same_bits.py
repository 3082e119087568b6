"""What the same bits at any CP size cost on one GPU: beside the default, and beside the kernel's deterministic mode.

    python -m benchmarks.same_bits --out same_bits.json
    python -m benchmarks.same_bits --device cpu --tokens 256 --heads 4:2 --head-dim 16 --kernel cpu --rounds 2

Each way is compared with the default before it is timed. TFLOP/s are of the causal half, a backward 2.5 times a
forward. That the bits are those of any ranks is for tests/runtime/test_same_bits_gpu.py to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dfa_megatron
from benchmarks.bench import Report, flags_of, median_ms, relative
from benchmarks.programs import draw, passes
from dfa_megatron import DistAttentionConfig
from dfa_megatron.doctor.world import own_device
from dfa_megatron.flags import flag

WAYS = {"default": ("fastest", False), "deterministic": ("fastest", True), "invariant": ("invariant", False)}
"""numerics, and whether PyTorch's deterministic algorithms are asked for."""


@dataclass(frozen=True)
class Shapes:
    """What is timed."""

    device: str = flag("auto", "where", choices=("auto", "cuda", "cpu"))
    tokens: tuple[int, ...] = flag((8192, 32768, 131072), "lengths")
    heads: tuple[str, ...] = flag(("32:8", "64:8"), "query heads : key heads")
    head_dim: int = flag(128, "of all")
    kernel: str = flag("auto", "as in the options")
    rounds: int = flag(7, "repetitions")
    out: Path | None = flag(None, "write the rows as JSON, after each")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one row for each length, heads and way."""
    shapes = flags_of(Shapes, __doc__, argv)
    device = own_device(shapes.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = Report(shapes.out, shapes)
    for tokens in shapes.tokens:
        for heads, kv_heads in (tuple(map(int, word.split(":"))) for word in shapes.heads):
            given = draw(tokens, heads, kv_heads, shapes.head_dim, device=device, dtype=dtype)
            found: dict[str, Any] = {}
            for way, (numerics, deterministic) in WAYS.items():
                torch.use_deterministic_algorithms(deterministic, warn_only=True)
                config = DistAttentionConfig(numerics=numerics, kernel=shapes.kernel)

                def attend(*qkv: torch.Tensor, config: DistAttentionConfig = config) -> Any:
                    return dfa_megatron.dist_flash_attn_func(*qkv, causal=True, config=config)

                forward, both = passes(attend, given[:3], given[3])
                found[way] = (forward(), *both())
                errors = [relative(mine, its) for mine, its in zip(found[way], found["default"], strict=True)]
                assert max(errors) < 2e-2, f"{way} is not the default: {errors}"
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                rounds = max(3, shapes.rounds * 8192 // tokens) if tokens > 8192 else shapes.rounds
                times = [median_ms(call, device, warmup=4, repeats=rounds) for call in (forward, both)]
                flops = 2 * tokens * tokens * heads * shapes.head_dim
                row = {"tokens": tokens, "heads": f"{heads}:{kv_heads}", "way": way}
                row |= {"forward_ms": times[0], "both_ms": times[1]}
                row |= {"forward_tflops": flops / times[0] / 1e9, "both_tflops": 3.5 * flops / times[1] / 1e9}
                if device.type == "cuda":
                    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                report.add(row)
                found = {name: x if name == "default" else () for name, x in found.items()}
            del given, found


if __name__ == "__main__":
    main()
