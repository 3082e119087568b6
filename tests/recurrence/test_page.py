"""The bytes on the page of hybrids are what the benchmark counts."""

from __future__ import annotations

import torch

from benchmarks.recurrence import Shapes, received
from tests.support import house

MIB = 2**20


def chain_bytes(shapes: Shapes, ranks: int, parts: int) -> int:
    """Return the bytes of a chain of maps, as flash-linear-attention 0.6 and Attention Gym (for torchtitan) gather it.

    Forward and backward, each rank gathers one float32 (key, value + key) per head and part, and `width - 1` tokens.

    Args:
        parts: of a rank's tokens that are apart from each other: 1 for contiguous tokens, 2 for zigzag.
    """
    maps = shapes.value_heads * shapes.head_dim * 2 * shapes.head_dim * 4
    tails = (shapes.width - 1) * shapes.conv_channels * getattr(torch, shapes.dtype).itemsize
    return 2 * (ranks - 1) * parts * (maps + tails)


def test_the_table_of_peers_has_the_bytes_that_the_benchmark_counts() -> None:
    page = (house.ROOT / "docs" / "hybrids.md").read_text(encoding="utf-8")
    eight, nine = (received(Shapes(), ranks) for ranks in (8, 9))
    assert f"| {(eight['states bytes'] + eight['convolution bytes']) / MIB:.0f} MiB |" in page
    chain, zigzag = (f"{chain_bytes(Shapes(), 8, parts) / MIB:.0f} MiB" for parts in (1, 2))
    assert f"| batches of one | {chain}, zigzag {zigzag} |" in page
    assert f"| one document | {chain} |" in page
    assert f"| {eight['heads for tokens bytes'] / 2**30:.1f} GiB |" in page
    assert f"states, and {eight['to zigzag and back bytes'] / MIB:.0f} MiB per attention layer" in page
    assert f"grows by {(nine['states bytes'] - eight['states bytes']) / MIB:.0f} MiB with each rank" in page
    per_ranks = ((ranks, received(Shapes(), ranks)) for ranks in range(8, 64))
    more = (n for n, x in per_ranks if 3 * (x["states bytes"] + x["convolution bytes"]) > x["to zigzag and back bytes"])
    assert abs(next(more) - 22) <= 1
    assert "From about 22 ranks on" in page
