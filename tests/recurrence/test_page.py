"""The bytes on the page of hybrids are what the benchmark counts."""

from __future__ import annotations

from benchmarks.recurrence import Shapes, received
from tests.support import house

MIB = 2**20


def test_the_table_of_peers_has_the_bytes_that_the_benchmark_counts() -> None:
    page = (house.ROOT / "docs" / "hybrids.md").read_text(encoding="utf-8")
    eight, nine = (received(Shapes(), ranks) for ranks in (8, 9))
    assert f"| {(eight['states bytes'] + eight['convolution bytes']) / MIB:.0f} MiB |" in page
    assert f"| {eight['heads for tokens bytes'] / 2**30:.1f} GiB |" in page
    assert f"states, and {eight['to zigzag and back bytes'] / MIB:.0f} MiB per attention layer" in page
    assert f"grows by {(nine['states bytes'] - eight['states bytes']) / MIB:.0f} MiB with each rank" in page
    per_ranks = ((ranks, received(Shapes(), ranks)) for ranks in range(8, 64))
    more = (n for n, x in per_ranks if 3 * (x["states bytes"] + x["convolution bytes"]) > x["to zigzag and back bytes"])
    assert abs(next(more) - 22) <= 1
    assert "From about 22 ranks on" in page
