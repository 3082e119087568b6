"""A stage of a pipeline that refuses a micro-batch says why; the others, which wait for it, end with the job."""

from __future__ import annotations

import pytest

from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.support.workers import run_ranks


def refuses(rank: int, world_size: int, windowed: list[int], chunks: int | None) -> None:
    row = like("mask", {"pp": 2, "vp": chunks}, config={"window_size": (7, 0), "window_attn_skip_freq": windowed})
    harness.step(row)


@pytest.mark.parametrize(("windowed", "chunks"), [([1, 0, 0, 0], None), ([0, 0, 0, 1], 2)])
def test_a_stage_that_refuses_says_why(windowed: list[int], chunks: int | None) -> None:
    with pytest.raises(AssertionError, match="a mask in a layer with window"):
        run_ranks(2, refuses, windowed, chunks, timeout=20, grace=0.1)
