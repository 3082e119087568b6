"""What the same bits at any CP size cost, beside the default and beside the kernel's deterministic mode.

    python -m benchmarks.same_bits --out same_bits.json
    torchrun --nproc-per-node 4 -m benchmarks.same_bits --out same_bits.json      # Ulysses too, on the same kernel
    python -m benchmarks.same_bits --device cpu --tokens 256 --heads 4:2 --head-dim 16 --kernel cpu --rounds 2

Each way is compared with the default before it is timed. Tokens are of the whole sequence; `packs` are tokens a rank.
TFLOP/s a rank are of the pairs that attend, a backward 2.5 times a forward. That the bits are those of any ranks is
for tests/runtime/test_same_bits.py to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import dfa_megatron
from benchmarks.attention.baselines.ulysses import to_heads, to_sequence
from benchmarks.bench import Flags, Report, benchmark, clear_memory, dtype_on, flags_of, median_ms, peak_gib, relative
from benchmarks.documents import Offsets, draw_documents, log_normal
from benchmarks.programs import draw, passes
from dfa_megatron import DistAttentionConfig, masks
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag

WAYS = {
    "default": ("fastest", False),
    "deterministic": ("fastest", True),
    "invariant": ("invariant", False),
    "ulysses deterministic": ("fastest", True),
}
"""numerics, and whether PyTorch's deterministic algorithms are asked for."""


@dataclass(frozen=True)
class Shapes(Flags):
    """What is timed."""

    tokens: tuple[int, ...] = flag((8192, 32768, 131072), "lengths of one causal sequence")
    packs: tuple[int, ...] = flag((), "tokens a rank of packed documents")
    heads: tuple[str, ...] = flag(("32:8", "64:8"), "query heads : key heads")
    head_dim: int = flag(128, "of all")
    kernel: str = flag("auto", "as in the options")
    rounds: int = flag(7, "repetitions")

    def sequences(self, ranks: int) -> Iterator[Offsets]:
        """Yield the offsets of the documents of each sequence."""
        yield from ((0, tokens) for tokens in self.tokens)
        yield from (draw_documents(ranks * tokens, 2 * ranks, 0, log_normal(7.0, 1.2)) for tokens in self.packs)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one row for each length, heads and way."""
    shapes = flags_of(Shapes, __doc__, argv)
    with benchmark(shapes) as (world, report):
        alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank] if world.size > 1 else None
        for offsets in shapes.sequences(world.size):
            for heads in shapes.heads:
                compare(shapes, offsets, heads, world, alone, report)
    torch.use_deterministic_algorithms(False)


def compare(shapes: Shapes, offsets: Offsets, heads: str, world: World, alone: Any, report: Report) -> None:
    """Compare and time the ways to attend to one sequence."""
    rows, (queries, keys) = offsets[-1] // world.size, map(int, heads.split(":"))
    given = draw(rows, queries, keys, shapes.head_dim, device=world.device, dtype=dtype_on(world.device))
    pairs = masks.documents([end - start for start, end in pairwise(offsets)]).area
    flops = 4 * pairs * queries * shapes.head_dim / world.size / 1e9
    wanted: tuple[torch.Tensor, ...] = ()
    for way, (numerics, deterministic) in WAYS.items():
        if way.startswith("ulysses") and (alone is None or keys % world.size):
            continue
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        config = DistAttentionConfig(numerics=numerics, kernel=shapes.kernel)
        attend = attention(offsets, config, alone if way.startswith("ulysses") else None)
        calls = passes(attend, given[:3], given[3])
        found = (calls[0](), *calls[1]())
        wanted = wanted or tuple(x.clone() for x in found)
        errors = [relative(*pair) for pair in zip(found, wanted, strict=True)]
        assert max(errors) < 2e-2, f"{way} is not the default: {errors}"
        del found
        clear_memory()
        repeats = max(3, shapes.rounds * 8192 // max(8192, rows))
        forward, both = (median_ms(call, world.device, warmup=4, repeats=repeats) for call in calls)
        report.add({
            "tokens": offsets[-1], "documents": len(offsets) - 1, "heads": heads, "way": way,
            "forward_ms": forward, "both_ms": both, "peak_gib": peak_gib(),
            "forward_tflops": flops / forward, "both_tflops": 3.5 * flops / both,
        })  # fmt: skip


def attention(offsets: Offsets, config: DistAttentionConfig, alone: Any) -> Callable[..., Any]:
    """Return an attention over all ranks, or that of a rank alone between all-to-alls."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if len(offsets) == 2:
            return dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=alone, config=config)
        pack = q.squeeze(0), k.squeeze(0), v.squeeze(0), offsets
        out = dfa_megatron.dist_flash_attn_varlen_func(*pack, causal=True, group=alone, config=config)
        return out.unsqueeze(0)  # type: ignore[union-attr]

    return attend if alone is None else lambda *qkv: to_sequence(attend(*(to_heads(x) for x in qkv)))


if __name__ == "__main__":
    main()
