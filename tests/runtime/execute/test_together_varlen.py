"""Packed documents with all ranks in one process: random packs against each document's dense float64 attention."""

from __future__ import annotations

import random

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.request import Request
from tests.support.arguments import arguments
from tests.support.cases import TOLERANCE, Case
from tests.support.close import assert_close
from tests.support.packs import pack, random_offsets, tokens_of
from tests.support.support_rows import helped_by_causal_masks_only, pack_mask
from tests.support.support_rows import schedule as schedule_row
from tests.support.together import backward_together, forward_together, prepare_together

MASKS = {
    "causal": (True, (-1, -1)),
    "bidirectional": (False, (-1, -1)),
    "causal window": (True, (4, 0)),
    "window": (False, (5, 2)),
    "left window": (False, (3, -1)),
}
SCHEDULES = (
    ("ring", "contiguous"),
    ("balanced", "contiguous"),
    ("balanced_shared", "contiguous"),
    ("greedy", "contiguous"),
    ("auto", "zigzag"),
    ("auto", "load_balanced"),
)


def run(request: Request, whole: Case, ranks: int) -> None:
    """Compare outputs, lse and gradients of every rank."""
    where = tokens_of(request.layout, request.cu_seqlens, ranks)

    def shards(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[None, rows] for rows in where]

    inputs = [shards(x) for x in whole.inputs]
    prepared = prepare_together(request, *inputs)
    results = forward_together(prepared, *inputs)
    outs, lses = [out for out, _ in results], [lse for _, lse in results]
    gradients = backward_together(prepared, shards(whole.dout), *inputs, outs, lses)
    tolerance = TOLERANCE[whole.dout.dtype]
    for rank, rows in enumerate(where):
        assert_close(outs[rank][0], whole.out[rows], tolerance=tolerance, name=f"out of rank {rank}")
        assert_close(lses[rank][0], whole.lse[:, rows], tolerance=tolerance, name=f"lse of rank {rank}")
    for at, name in enumerate(("dq", "dk", "dv")):
        got = torch.empty_like(whole.gradients[at])
        for rows, shard in zip(where, gradients, strict=True):
            got[rows] = shard[at][0].double()
        assert_close(got, whole.gradients[at], tolerance=4 * tolerance, name=name)


@pytest.mark.support("schedules", schedule_row, pack_mask, refuses=helped_by_causal_masks_only)
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES)
def test_random_packs_are_exact_on_one_to_sixteen_ranks(schedule: str, layout: str, mask: str) -> None:
    causal, window = MASKS[mask]
    draw = random.Random(f"{schedule} {mask}")
    served = 0
    for ranks in (1, 2, 3, 4, draw.choice([5, 6, 7]), draw.choice([8, 11, 16])):
        offsets = random_offsets(ranks * 2 * draw.randint(1, 7), draw)
        kernel = draw.choice(["reference", "cpu"])
        options = {"causal": causal, "window_size": window, "softmax_scale": 0.3}
        request = Request(**arguments(schedule=schedule, layout=layout, kernel=kernel, cu_seqlens=offsets, **options))
        heads = draw.choice([(4, 4), (4, 2), (6, 1), (3, 3)])
        try:
            run(request, pack(offsets, heads=heads[0], kv_heads=heads[1], seed=ranks, **options), ranks)
        except UnsupportedError:
            assert schedule.startswith("balanced")
            continue
        served += 1
    assert served >= (0 if schedule.startswith("balanced") and not causal else 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_packs_are_exact_to_rounding_in_every_dtype(kernel: str, dtype: torch.dtype) -> None:
    for ranks in (2, 4):
        offsets = (0, 1, 9, 30, ranks * 24)
        request = Request(**arguments(softmax_scale=0.3, kernel=kernel, cu_seqlens=offsets))
        run(request, pack(offsets, dtype=dtype, head_dim=32, seed=ranks), ranks)


def test_a_width_of_values_of_its_own_works_in_packs() -> None:
    offsets = (0, 3, 20, 21, 40)
    request = Request(**arguments(softmax_scale=0.3, kernel="reference", cu_seqlens=offsets))
    run(request, pack(offsets, head_dim=16, head_dim_v=8), 4)


def test_one_document_is_planned_as_a_plain_sequence() -> None:
    plain = Request(**arguments(softmax_scale=0.3, window_size=(5, 0)))
    packed = Request(**arguments(softmax_scale=0.3, window_size=(5, 0), cu_seqlens=(0, 24)))
    assert packed.mask_over(24) == plain.mask_over(24)
