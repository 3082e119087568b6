"""Every mask of `dfa_megatron.masks`, forward and backward, against dense attention in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import DistAttentionConfig, dist_flash_attn_func
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.plan_run.together import backward_together, forward_together, prepare_together
from dfa_megatron.runtime.request import Request
from dfa_megatron.testing.dense import assert_close, dense_attention
from dfa_megatron.testing.workers import run_ranks
from tests.support.plan_cases import Case, every_mask, heterogeneous_masks

DRAWN = 16
"""How many cases a random test draws; `make fuzz` draws as many as one likes."""

NAMES = ("out", "dq", "dk", "dv")
Tensors = list[torch.Tensor]


def all_masks(tokens: int, rng: random.Random) -> list[Case]:
    return [*every_mask(tokens, rng), *heterogeneous_masks(tokens, rng)]


def drawn(case: Case, batch: int, group: int, kernel: str) -> tuple[Tensors, Tensors]:
    """q, k, v and dout, then what dense attention makes of them in float64."""
    dtype = torch.float32 if kernel == "triton" else torch.float64
    heads, width = (2 * group, 2, 2, 2 * group), 16 if kernel == "triton" else 4
    given = [torch.randn(batch, case.mask.length, h, width, dtype=torch.float64).to(dtype) for h in heads]
    leaves = [x.double().requires_grad_() for x in given[:3]]
    out, _ = dense_attention(*leaves, visible=torch.from_numpy(case.dense))
    return given, [out.detach(), *torch.autograd.grad(out, leaves, given[3].double())]


def compare(case: Case, ranks: int, schedule: str, kernel: str, batch: int, group: int) -> None:
    """All ranks in this process."""
    given, want = drawn(case, batch, group, kernel)
    q, k, v, dout = (x.chunk(ranks, 1) for x in given)
    config = DistAttentionConfig(schedule=schedule, kernel=kernel)
    request = Request(softmax_scale=given[0].shape[-1] ** -0.5, mask=case.mask, config=config)
    prepared = prepare_together(request, q, k, v)
    out, lse = zip(*forward_together(prepared, q, k, v), strict=True)
    gradients = backward_together(prepared, dout, q, k, v, out, lse)
    got = torch.cat(out, 1), *(torch.cat(parts, 1) for parts in zip(*gradients, strict=True))
    tolerance = 2e-5 if kernel == "triton" else 1e-13
    for name, mine, whole in zip(NAMES, got, want, strict=True):
        told = f"{name} of {case.mask.name} on {ranks} ranks, {schedule}, {kernel}, batch {batch}, group {group}"
        assert_close(mine, whole, tolerance=tolerance, name=told)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_random_masks_on_random_ranks_are_dense_attention(schedule: str, kernel: str) -> None:
    rng, served = random.Random(f"{schedule} {kernel}"), 0
    torch.manual_seed(0)
    while served < DRAWN:
        ranks = rng.randint(1, 9)
        for case in rng.sample(all_masks(ranks * rng.randint(1, 7) + (ranks == 1), rng), 4):
            looks_ahead = any(tile.kv.hi > tile.q.lo + 1 and tile.hi > 0 for tile in case.mask.tiles)
            if "balanced" in schedule and looks_ahead:
                continue
            compare(case, ranks, schedule, kernel, rng.randint(1, 2), rng.randint(1, 3))
            served += 1


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", range(20))
def test_every_mask_serves_schedules_that_look_both_ways(kind: int, batch: int) -> None:
    torch.manual_seed(kind)
    case = all_masks(36, random.Random(kind))[kind]
    for schedule in ("ring", "greedy"):
        compare(case, 3, schedule, "reference", batch, 2)


def on_a_rank(rank: int, world_size: int, number: int) -> None:
    torch.manual_seed(number)
    rng = random.Random(number)
    for case in rng.sample(all_masks(12 * world_size, rng), 4):
        for schedule, batch in (("greedy", 2), ("ring", 1)):
            given, want = drawn(case, batch, 2, "reference")
            q, k, v, dout = (x.chunk(world_size, 1)[rank].clone() for x in given)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = dist_flash_attn_func(*leaves, mask=case.mask, config=DistAttentionConfig(schedule=schedule))
            assert isinstance(out, torch.Tensor)
            got = [out, *torch.autograd.grad(out, leaves, dout)]
            for name, mine, whole in zip(NAMES, got, want, strict=True):
                assert_close(
                    mine, whole.chunk(world_size, 1)[rank], tolerance=1e-13, name=f"{name} of {case.mask.name}"
                )
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 3])
def test_masks_over_gloo_are_dense_attention(ranks: int) -> None:
    run_ranks(ranks, on_a_rank, ranks)
