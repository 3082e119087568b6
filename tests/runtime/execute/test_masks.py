"""Every mask of `dfa_megatron.masks`, forward and backward, against dense attention in float64."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import DistAttentionConfig, dist_flash_attn_func, masks, tree_positions
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.runtime.request import Request
from tests.support.close import assert_close
from tests.support.plan_cases import WAYS, Case, ancestors, every_mask, heterogeneous_masks, plan_of, some_parents
from tests.support.together import both_together, prepare_together
from tests.support.workers import run_ranks

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
    out, _, gradients = both_together(prepared, q, k, v, dout)
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


def paths(lengths: list[int], parents: list[int]) -> list[list[int]]:
    """The tokens of each path from a root to a leaf: its prompt is repeated for every leaf."""
    ends = list(accumulate(lengths, initial=0))
    own = [list(range(lo, hi)) for lo, hi in pairwise(ends)]
    leaves = [segment for segment in range(len(lengths)) if segment not in parents]
    return [[token for above in reversed(ancestors(leaf, parents)) for token in own[above]] for leaf in leaves]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_tree_is_its_paths_with_every_prompt_repeated(ranks: int) -> None:
    """Outputs of all copies are equal, and the gradient of a shared token is the sum over its copies."""
    rng = random.Random(ranks)
    torch.manual_seed(ranks)
    for number in range(3):
        lengths = [rng.randint(1, 5) for _ in range(rng.randint(8, 14))]
        lengths[-1] += -sum(lengths) % (2 * ranks)
        parents = some_parents(len(lengths), rng) if number else [-1, *[0] * (len(lengths) - 1)]
        given = [torch.randn(1, sum(lengths), heads, 4, dtype=torch.float64) for heads in (6, 2, 2, 6)]
        leaves, dout = [x.requires_grad_() for x in given[:3]], given[3]
        each = paths(lengths, parents)
        rows = torch.tensor([token for path in each for token in path])
        repeated, _ = dense_attention(*(x[:, rows] for x in leaves), visible=masks.documents([len(p) for p in each]))
        copies = torch.bincount(rows)[rows, None, None]
        gradients = torch.autograd.grad(repeated, leaves, dout[:, rows] / copies)
        positions = tree_positions(lengths, parents)
        assert torch.equal(positions[rows], torch.tensor([place for path in each for place in range(len(path))]))
        for way in WAYS:
            plan = plan_of(way, masks.prompt_tree(lengths, parents), ranks)
            out, *got = whole(plan, given)
            for name, mine, want in zip(NAMES, (out[:, rows], *got), (repeated, *gradients), strict=True):
                assert_close(mine, want, tolerance=1e-13, name=f"{name} of {parents} on {ranks} ranks, {way}")


def whole(plan: AttentionPlan, given: Tensors) -> Tensors:
    """Out, dq, dk and dv of all tokens; all ranks in this process, each with the tokens of the plan's layout."""
    held = [plan.forward.layout.positions(rank) for rank in range(plan.ranks)]
    q, k, v, dout = ([x[:, rows].detach() for rows in held] for x in given)
    prepared = prepare_together(Request(softmax_scale=0.5, plan=plan, layout=plan.layout), q, k, v)
    out, _, gradients = both_together(prepared, q, k, v, dout)
    order = torch.tensor([token for rows in held for token in rows]).argsort()
    return [torch.cat(parts, 1)[:, order] for parts in (out, *zip(*gradients, strict=True))]


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
