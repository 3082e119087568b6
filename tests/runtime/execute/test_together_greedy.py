"""The greedy schedule in one process: real programs, kernels and wire format against dense float64 attention."""

from __future__ import annotations

import pytest

from dfa_megatron.runtime.request import Request
from tests.runtime.execute.test_together import MASKS, run
from tests.support.arguments import arguments
from tests.support.cases import case
from tests.support.support_rows import mask as mask_column
from tests.support.support_rows import schedule as schedule_row


@pytest.mark.support("schedules", schedule_row, mask_column)
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_greedy_is_exact(ranks: int, mask: str) -> None:
    causal, window = MASKS[mask]
    whole = case(ranks * 11, causal=causal, window_size=window, softmax_scale=0.3, seed=ranks)
    request = Request(
        **arguments(
            softmax_scale=0.3,
            causal=causal,
            window_size=window,
            schedule="greedy",
            layout="contiguous",
            kernel="reference",
        )
    )
    run(request, whole, ranks, "contiguous")
