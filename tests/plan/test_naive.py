"""The naive run of plans, for readers, against dense attention in float64."""

from __future__ import annotations

import random

import pytest
import torch

from dfa_megatron import naive
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.plan.language.ir import AttentionPlan
from tests.support.close import assert_close
from tests.support.plan_cases import WAYS, Case, attention_plans, every_mask, heterogeneous_masks


def compare(plan: AttentionPlan, case: Case, batch: int) -> None:
    """Forward and backward of a plan, with 2 query heads per kv head and a value width of its own."""
    torch.manual_seed(plan.ranks)
    tokens, scale = case.mask.length, 0.4
    q, k, v = (
        torch.randn(batch, tokens, heads, width, dtype=torch.float64) for heads, width in ((4, 3), (2, 3), (2, 5))
    )
    dout = torch.randn(batch, tokens, 4, 5, dtype=torch.float64)
    rows = [torch.tensor(plan.forward.layout.positions(rank)) for rank in range(plan.ranks)]
    shards = [[x[:, mine] for mine in rows] for x in (q, k, v)]
    results = naive.forward(plan, *shards, scale)
    gradients = naive.backward(plan, [dout[:, mine] for mine in rows], *shards, results, scale)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, visible=torch.from_numpy(case.dense), softmax_scale=scale)
    want = out, lse.mT.unsqueeze(-1), *torch.autograd.grad(out, leaves, dout)
    for rank, mine in enumerate(rows):
        got = (*results[rank], *gradients[rank])
        for name, mine_got, whole in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert_close(mine_got, whole[:, mine], tolerance=1e-13, name=f"{plan} {name} of rank {rank}")


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_the_naive_run_of_a_plan_is_dense_attention(way: str, ranks: int) -> None:
    rng, served = random.Random(ranks), 0
    every = [*every_mask(4 * ranks, rng), *heterogeneous_masks(4 * ranks, rng)]
    for case in every if ranks == 3 else [every[0], *rng.sample(every[1:], 7)]:
        for _, plan in attention_plans(case, ranks, ways=(way,)):
            compare(plan, case, batch=1 + served % 2)
            served += 1
    assert served > (4 if ranks == 3 else 0)
