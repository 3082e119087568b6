"""A stage of a pipeline that refuses a micro-batch ends the others, which wait for it in a receive of Megatron's."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.agreement import watchdog
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.support.workers import run_ranks


def refuses(rank: int, world_size: int, windowed: list[int], chunks: int | None) -> None:
    """The stage that refuses lives on, as in a loop that catches the error, or under a launcher that ends nobody."""
    row = like("mask", {"pp": 2, "vp": chunks}, config={"window_size": (7, 0), "window_attn_skip_freq": windowed})
    with patch.object(watchdog, "GRACE", 0.5), pytest.raises(UnsupportedError, match="a mask in a layer with window"):
        harness.step(row)
    time.sleep(30)


@pytest.mark.parametrize(("windowed", "chunks", "waits"), [([1, 0, 0, 0], None, 1), ([0, 0, 0, 1], 2, 0)])
def test_a_stage_that_waits_for_one_that_refuses_is_ended(windowed: list[int], chunks: int | None, waits: int) -> None:
    with pytest.raises(AssertionError, match=rf"rank {waits}: the process died with exit code {watchdog.EXIT_STATUS}"):
        run_ranks(2, refuses, windowed, chunks, timeout=20, grace=0.1)
