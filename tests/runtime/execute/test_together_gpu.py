"""One GPU plays all ranks: every GPU kernel under every kind of schedule and pack, in bfloat16, without a network."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from tests.runtime.execute.test_together import SCHEDULES
from tests.support.attend import pack, together
from tests.support.packs import random_offsets, served, skip_unless_it_serves_this_gpu

SHAPE: dict[str, Any] = {"heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.support("runtime", "one GPU as 2 to 8 ranks: `flash4`, `triton`, `aten`, `cudnn`; every schedule, packs")
@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packs"])
@pytest.mark.parametrize("kernel", ["flash4", "triton", "aten", "cudnn"])
def test_kernels_are_exact_on_two_to_eight_ranks(kernel: str, packed: bool) -> None:
    skip_unless_it_serves_this_gpu(kernel)
    draw, done = random.Random(f"{kernel} {packed}"), 0
    for ranks in (2, 3, 4, 8):
        local = 2 * draw.choice([32, 65, 96, 128])
        whole = pack(random_offsets(ranks * local, draw) if packed else (0, ranks * local), seed=ranks, **SHAPE)
        for schedule, layout in SCHEDULES[2:]:
            run = functools.partial(together, whole, ranks, schedule=schedule, layout=layout, kernel=kernel)
            done += served(kernel, run)
    assert done >= 4
