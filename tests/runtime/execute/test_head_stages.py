"""Heads in stages: exact in every way to run the operator, and with one stage's receive memory at a time."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime import op
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.prepare import in_use
from tests.support.attend import case, compare, pack
from tests.support.nan_memory import nan_memory
from tests.support.workers import run_ranks


def _arena() -> int:
    return max(prepared.arena_bytes for prepared in in_use())


def _everything(rank: int, ranks: int) -> None:
    with nan_memory():
        whole = case(ranks * 10, heads=8, kv_heads=4, seed=1)
        compare(whole, rank, ranks, schedule="balanced")
        arena = _arena()
        for stages in (2, 4):
            before = COUNTERS.attention_forwards
            compare(whole, rank, ranks, schedule="balanced", head_stages=stages)
            assert COUNTERS.attention_forwards == before + stages
            assert in_use()[-1].arena_bytes == pytest.approx(arena / stages, rel=0.1)
        compare(whole, rank, ranks, layout="zigzag", head_stages=2, ulysses_degree=1)
        if ranks % 2 == 0:
            compare(case(ranks * 10, heads=8, kv_heads=4, seed=3), rank, ranks, head_stages=2, ulysses_degree=2)
        compare(case(ranks * 10, with_sinks=True, seed=4), rank, ranks, head_stages=2)
        offsets = (0, 3, 4, ranks * 6, ranks * 8)
        compare(pack(offsets), rank, ranks, head_stages=2)
        _same_bits_under_remat()
        _no_gradient_outlives_its_stage()
        with pytest.raises(UnsupportedError, match=r"head_stages=3 with 4 kv heads.*one of 1, 2, 4"):
            compare(case(ranks * 10, heads=8, kv_heads=4), rank, ranks, head_stages=3)


def attend(x: torch.Tensor, head_stages: int) -> torch.Tensor:
    q, k, v = x.chunk(3, -1)
    config = DistAttentionConfig(head_stages=head_stages)
    out = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, config=config)
    assert isinstance(out, torch.Tensor)
    return out


def _same_bits_under_remat() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return attend(x, head_stages=2).sin()

    x = torch.randn(1, 6, 4, 24, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(region(x).sum(), x)
    before = COUNTERS.attention_forwards
    rerun = checkpoint(region, x, use_reentrant=False, context_fn=partial(remat.context_fn))
    (got,) = torch.autograd.grad(rerun.sum(), x)
    assert torch.equal(got, want)
    assert COUNTERS.attention_forwards == before + 2, "once, in two stages"


def _no_gradient_outlives_its_stage() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    gradients = op.run_backward

    def watched(*given: Any) -> op.InputGradients:
        assert [one() for one in made] == [None] * len(made)
        found = gradients(*given)
        made.extend(weakref.ref(x) for x in found[:3])
        return found

    with patch.object(op, "run_backward", watched):
        attend(torch.randn(1, 6, 4, 24, requires_grad=True), head_stages=4).sum().backward()
    assert len(made) == 12


@pytest.mark.support("runtime", "heads in stages (`head_stages`), with every schedule, packs, sinks and remat")
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_of_heads_are_exact_and_divide_the_receive_memory(ranks: int) -> None:
    run_ranks(ranks, _everything)


def test_the_compiled_operator_runs_in_stages_too() -> None:
    x = [torch.randn(1, 6, 4, 8, requires_grad=True) for _ in range(3)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, config=STAGED)
        assert isinstance(out, torch.Tensor)
        return out * 2

    want = torch.autograd.grad(run(*x).sum(), x)
    got = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(*x).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


STAGED = DistAttentionConfig(head_stages=2)
"""Made outside of what is compiled."""


def test_a_planner_of_packs_plans_for_one_stages_heads() -> None:
    planner = dfa_megatron.AttentionPlanner(8, heads=4, head_dim=8, causal=True, config=STAGED)
    assert planner((0, 8)).problem.shape.heads == 2
    with pytest.raises(UnsupportedError, match="head_stages=2 with 3 kv heads"):
        dfa_megatron.AttentionPlanner(8, heads=3, head_dim=8, causal=True, device="cpu", config=STAGED)
