"""All ranks in one process: the real plans, programs, kernels and wire format against dense float64 attention."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.runtime.request import Request
from tests.support.arguments import arguments
from tests.support.attend import case, pack, prepare_together, together
from tests.support.packs import random_offsets, served, skip_unless_it_serves_this_gpu
from tests.support.support_rows import helped_by_causal_masks_only, mask, pack_mask, schedule

KERNEL = "triton" if interpreted() else "reference"
"""Some of the file runs again in Triton's interpreter: tests/kernels/test_kernel_triton_interpreted.py."""
SMALL: dict[str, Any] = {"heads": 2, "batch": 1, "dtype": torch.float32} if interpreted() else {}
RANKS = (3,) if interpreted() else (3, 4, 1, 2, 5, 8)
SCHEDULES = (
    ("ring", "contiguous"),
    ("balanced", "contiguous"),
    ("balanced_shared", "contiguous"),
    ("greedy", "contiguous"),
    ("auto", "zigzag"),
    ("auto", "load_balanced"),
)
MASKS = {
    "causal": (True, (-1, -1)),
    "full": (False, (-1, -1)),
    "window": (True, (7, 0)),
    "two sides": (False, (5, 3)),
    "left window": (False, (3, -1)),
}
PACK_MASKS = {
    "causal": (True, (-1, -1)),
    "bidirectional": (False, (-1, -1)),
    "causal window": (True, (4, 0)),
    "window": (False, (5, 2)),
    "left window": (False, (3, -1)),
}


def looks_ahead(schedule: str, mask: str) -> bool:
    """A balanced schedule refuses it: on more than one rank there is nothing to pair."""
    return schedule.startswith("balanced") and mask in ("full", "two sides", "left window")


@pytest.mark.support("schedules", schedule, mask, refuses=helped_by_causal_masks_only)
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES[:5])
def test_every_schedule_is_exact_on_odd_and_even_ranks(schedule: str, layout: str, mask: str) -> None:
    causal, window = MASKS[mask]
    served = 0
    for ranks in (*RANKS[:2], *random.Random(f"{schedule} {mask}").sample(RANKS[2:], 2 if RANKS[2:] else 0)):
        draw = random.Random(f"{schedule} {mask} {ranks}")
        local = draw.randrange(2, 6) * 2 + (draw.randrange(2) if layout == "contiguous" else 0)
        shape = {"kv_heads": draw.choice([1, 2, 4])} | SMALL | ({"kv_heads": 1} if SMALL else {})
        asked: dict[str, Any] = {"causal": causal, "window_size": window, "softmax_scale": 0.3}
        whole = case(ranks * local, seed=ranks, **asked, **shape)
        try:
            together(whole, ranks, schedule=schedule, layout=layout, kernel=KERNEL)
        except UnsupportedError:
            assert looks_ahead(schedule, mask)
            continue
        served += 1
    assert served >= (0 if looks_ahead(schedule, mask) else len(RANKS[:2]))


@pytest.mark.support("schedules", schedule, pack_mask, refuses=helped_by_causal_masks_only)
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", PACK_MASKS)
@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES)
def test_random_packs_are_exact_on_one_to_sixteen_ranks(schedule: str, layout: str, mask: str) -> None:
    causal, window = PACK_MASKS[mask]
    draw = random.Random(f"{schedule} {mask}")
    counts = RANKS if SMALL else (3, draw.choice([8, 11, 16]), draw.choice([1, 2]), draw.choice([4, 5, 6, 7]))
    served = 0
    for ranks in counts:
        offsets = random_offsets(ranks * 2 * draw.randint(1, 7), draw)
        kernel = KERNEL if SMALL else draw.choice([KERNEL, "cpu"])
        heads, kv_heads = (2, 1) if SMALL else draw.choice([(4, 4), (4, 2), (6, 1), (3, 3)])
        asked: dict[str, Any] = {"causal": causal, "window_size": window, "seed": ranks}
        whole = pack(offsets, **SMALL | {"heads": heads, "kv_heads": kv_heads}, **asked)
        try:
            together(whole, ranks, schedule=schedule, layout=layout, kernel=kernel)
        except UnsupportedError:
            assert schedule.startswith("balanced")
            continue
        served += 1
    assert served >= (0 if schedule.startswith("balanced") and not causal else len(counts))


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_exact_to_rounding_plain_and_packed(dtype: torch.dtype, kernel: str) -> None:
    for heads, kv_heads in ((4, 1), (33, 33), (6, 2)):
        together(case(3 * 14, heads=heads, kv_heads=kv_heads, head_dim=32, dtype=dtype, seed=heads), 3, kernel=kernel)
    together(pack((0, 1, 9, 30, 4 * 24), dtype=dtype, head_dim=32), 4, kernel=kernel)


def test_one_document_is_planned_as_a_plain_sequence() -> None:
    plain = Request(**arguments(softmax_scale=0.3, window_size=(5, 0)))
    packed = Request(**arguments(softmax_scale=0.3, window_size=(5, 0), cu_seqlens=(0, 24)))
    assert packed.mask_over(24) == plain.mask_over(24)


@pytest.mark.support("runtime", "either backward payload, delta or out")
@pytest.mark.parametrize(("kernel", "reads"), [("reference", "delta"), ("cpu", "out")])
def test_both_backward_payloads_are_exact(kernel: str, reads: str) -> None:
    whole = case(40)
    request = Request(**arguments(softmax_scale=0.25, kernel=kernel))
    prepared = prepare_together(request, *(x.chunk(4, 1) for x in whole.inputs))
    assert prepared[0].backward.sizes.backward_needs == reads
    together(whole, 4, kernel=kernel)


def test_large_scores_neither_overflow_nor_lose_rows() -> None:
    together(case(48, softmax_scale=40.0), 4, kernel="reference", tolerance=1e-12)


# One GPU plays all ranks, without a network.

ON_GPU: dict[str, Any] = {"heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.support("runtime", "one GPU as 2 to 8 ranks: `flash4`, `triton`, `aten`, `cudnn`; every schedule, packs")
@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packs"])
@pytest.mark.parametrize("kernel", ["flash4", "triton", "aten", "cudnn"])
def test_kernels_are_exact_on_two_to_eight_ranks(kernel: str, packed: bool) -> None:
    skip_unless_it_serves_this_gpu(kernel)
    draw, done = random.Random(f"{kernel} {packed}"), 0
    for ranks in (2, 3, 4, 8):
        local = 2 * draw.choice([32, 65, 96, 128])
        whole = pack(random_offsets(ranks * local, draw) if packed else (0, ranks * local), seed=ranks, **ON_GPU)
        for name, layout in SCHEDULES[2:]:
            run = functools.partial(together, whole, ranks, schedule=name, layout=layout, kernel=kernel)
            done += served(kernel, run)
    assert done >= 4
