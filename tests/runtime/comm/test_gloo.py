"""Real processes over gloo: the public function against dense float64 attention, in groups of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.attend import Results, assert_same_bits, attend, case, compare, results
from tests.support.nan_memory import nan_memory
from tests.support.workers import over_ranks, run_ranks

LAYOUTS = (("ring", "contiguous"), ("balanced", "contiguous"), ("balanced_shared", "contiguous"), ("auto", "zigzag"))


@pytest.mark.support("runtime", "every schedule and dtype between 2, 3 and 4 processes (gloo)")
@pytest.mark.support("runtime", "head counts that do not divide among ranks")
@over_ranks(2, 3, 4)
def test_every_schedule_and_dtype_is_exact_over_gloo(rank: int, ranks: int) -> None:
    with nan_memory():
        for seed, (schedule, layout) in enumerate(LAYOUTS):
            for dtype in (torch.float64, (torch.float32, torch.bfloat16)[(seed + ranks) % 2]):
                whole = case(ranks * 10, dtype=dtype, heads=6, seed=seed)
                compare(whole, rank, ranks, schedule=schedule, layout=layout)
        compare(case(ranks * 10, causal=False, seed=9), rank, ranks)
        for kernel in ("cpu", "reference"):
            compare(case(ranks * 10, window_size=(13, 0), seed=10), rank, ranks, kernel=kernel)
        for heads, kv_heads in ((33, 33), (2, 2), (8, 1), (3, 1)):
            compare(case(ranks * 6, heads=heads, kv_heads=kv_heads, seed=heads), rank, ranks)
        for first in ("tokens", "heads"):
            compare(case(ranks * 8, batch=3, first_in_memory=first), rank, ranks)
    # The gradient of a sum is one number expanded: strides of zero.
    total, _ = case(ranks * 8, batch=3).shard(rank, ranks)
    dfa_megatron.dist_flash_attn_func(*total, causal=True).sum().backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in total)


@over_ranks(4)
def test_group_ranks_are_translated_to_global_ranks(rank: int, ranks: int) -> None:
    # Ranks 1 and 3 are group ranks 0 and 1 of their group: a peer that is not translated would be the wrong process.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    compare(case(24, seed=mine), rank // 2, 2, group=groups[mine])
    compare(case(24, seed=5 + mine), rank // 2, 2, group=groups[mine].group_name, schedule="balanced")
    reverse = dist.new_group([3, 1, 0])
    if rank in (3, 1, 0):
        compare(case(36, seed=8), dist.get_rank(reverse), 3, group=reverse)


def _deterministic(rank: int, ranks: int) -> Results:
    torch.use_deterministic_algorithms(True)
    runs = [results(case(ranks * 16, dtype=torch.float32), rank, ranks) for _ in range(3)]
    assert_same_bits(*runs)
    return runs[0]


@pytest.mark.support("runtime", "deterministic gradients between ranks")
def test_deterministic_gradients_are_equal_to_the_bit_from_run_to_run() -> None:
    first, second = run_ranks(3, _deterministic), run_ranks(3, _deterministic)
    for mine, again in zip(first, second, strict=True):
        assert_same_bits(mine, again)


@over_ranks(4)
def test_bytes_on_the_wire_are_those_of_the_plan(rank: int, ranks: int) -> None:
    whole = case(ranks * 128, batch=1, heads=4, kv_heads=4, head_dim=32, dtype=torch.bfloat16)
    shard, _ = whole.shard(rank, ranks)
    COUNTERS.reset()
    attend(whole, *shard, schedule="balanced").sum().backward()
    found, one, lse = COUNTERS.snapshot(), 128 * 4 * 32 * 2, 128 * 4 * 4  # a chunk of q, k, v or out
    # Rank 0 sends its keys and values to ranks 1 and 2 and helps rank 3 once.
    assert found["forward_bytes"] == (4 * one + one + lse, 4 * one, 2 * one, one)[rank]
    assert found["forward_messages"] == (3, 2, 1, 1)[rank]
    assert found["attention_forwards"] == found["attention_backwards"] == 1
