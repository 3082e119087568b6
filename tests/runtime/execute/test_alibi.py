"""ALiBi by global position: exact against dense attention with its bias, wherever ranks hold their tokens."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.planner import AttentionPlanner
from dfa_megatron.runtime import rank_plan
from tests.runtime.comm.test_gloo import LAYOUTS
from tests.support.arguments import arguments
from tests.support.attend import Case, case, compare, pack
from tests.support.nan_memory import nan_memory
from tests.support.workers import run_ranks


def with_slopes(tokens: int, **options: Any) -> Case:
    return case(tokens, with_slopes=True, head_dim=8, **options)


def packed(ranks: int, **options: Any) -> Case:
    return pack((0, 3, 4, 13, ranks * 16), with_slopes=True, head_dim=8, **options)


def _everything(rank: int, ranks: int) -> None:
    length = ranks * 10
    with nan_memory():
        for seed, (schedule, layout) in enumerate(LAYOUTS):
            compare(with_slopes(length, seed=seed), rank, ranks, schedule=schedule, layout=layout)
        compare(with_slopes(length, seed=9, causal=False, dtype=torch.bfloat16), rank, ranks)
        compare(with_slopes(length, seed=10, window_size=(7, 0), heads=6, kv_heads=1), rank, ranks)
        compare(with_slopes(length, seed=11, softcap=1.5, with_sinks=True), rank, ranks)
        for layout in ("contiguous", "zigzag", "load_balanced"):
            compare(packed(ranks, causal=layout == "zigzag"), rank, ranks, layout=layout)


@pytest.mark.support("runtime", "ALiBi between processes, packs among it")
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_public_functions_are_exact(ranks: int) -> None:
    run_ranks(ranks, _everything, timeout=120)


def _exchanged(rank: int, ranks: int) -> None:
    with nan_memory():
        for heads, kv_heads in ((4, 4), (12, 6), (8, 1)):
            compare(with_slopes(4 * ranks, heads=heads, kv_heads=kv_heads), rank, ranks, ulysses_degree=2)
        compare(with_slopes(4 * ranks), rank, ranks, layout="zigzag", ulysses_degree=2)
        compare(pack((0, 5, 9, 8 * ranks), with_slopes=True), rank, ranks, ulysses_degree=2)


def test_slopes_go_with_their_heads_where_ranks_exchange_them() -> None:
    run_ranks(4, _exchanged, timeout=120)


def _ahead(rank: int, ranks: int) -> None:
    whole = packed(ranks, softmax_scale=None)
    for layout in ("contiguous", "load_balanced"):
        options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float64, "device": "cpu"}
        known = AttentionPlanner(16, **arguments(**options, layout=layout, alibi=True))(whole.offsets)
        rank_plan.planned.cache_clear()
        pickle.loads(pickle.dumps(known)).use()  # noqa: S301 (our own)
        compare(whole, rank, ranks, layout=layout)
        assert rank_plan.planned.cache_info().misses == 0


def test_a_pack_planned_ahead_knows_the_tokens_of_its_rows() -> None:
    run_ranks(2, _ahead)


def _wrong(rank: int, ranks: int) -> None:
    whole = case(4, seed=rank)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def attend(**options: Any) -> None:
        dfa_megatron.dist_flash_attn_func(*whole.inputs, **arguments(**options))

    with pytest.raises(UnsupportedError, match=r"alibi_slopes \(3,\).*one number for each of 4 query heads"):
        attend(alibi_slopes=slopes[:3])
    with pytest.raises(UnsupportedError, match=r"a float32 tensor \(heads,\) on cpu"):
        attend(alibi_slopes=slopes.double(), schedule="ring")
    with pytest.raises(UnsupportedError, match=r"require a gradient.*alibi_slopes\.detach\(\)"):
        attend(alibi_slopes=slopes.clone().requires_grad_())
    with pytest.raises(UnsupportedError, match=r"kernel='cpu'.*adds no ALiBi.*kernel='reference'"):
        attend(alibi_slopes=slopes, kernel="cpu")
    with pytest.raises(DisagreementError, match=r"request\.alibi: (True|False) on rank"):
        attend(alibi_slopes=slopes if rank else None, schedule="balanced")
    with pytest.raises(DisagreementError, match=r"alibi_slopes: 0\.5, 0\.25, 0\.125, 0\.0625 \(digest"):
        attend(alibi_slopes=slopes * (1 + rank), schedule="balanced")
    with pytest.raises(DisagreementError if rank else UnsupportedError, match="alibi_slopes"):
        attend(alibi_slopes=slopes if rank else slopes[:2], schedule="balanced_shared")


def test_wrong_slopes_are_an_error_on_every_rank() -> None:
    run_ranks(2, _wrong)


def test_slopes_that_require_a_gradient_are_refused_by_what_is_compiled() -> None:
    whole, slopes = case(6), torch.full((4,), 0.5, requires_grad=True)
    compiled = torch.compile(dfa_megatron.dist_flash_attn_func, backend="aot_eager")
    with pytest.raises(Exception, match="require a gradient"):
        compiled(*whole.inputs, causal=True, alibi_slopes=slopes)


# GPUs.


def _on_gpus(rank: int, ranks: int) -> None:
    def check(whole: Case, **options: Any) -> None:
        compare(
            replace(whole, with_slopes=True, dtype=torch.bfloat16, device="cuda", head_dim=8), rank, ranks, **options
        )

    length, offsets = ranks * 160, (0, 30, 31, 130, ranks * 160)
    for kernel in ("triton", "reference"):
        for seed, (schedule, layout) in enumerate(LAYOUTS):
            check(case(length, seed=seed), kernel=kernel, schedule=schedule, layout=layout)
        check(case(length, seed=8, causal=False), kernel=kernel)
        check(case(length, seed=9, window_size=(40, 0)), kernel=kernel)
        for layout in ("contiguous", "zigzag", "load_balanced"):
            check(pack(offsets), kernel=kernel, layout=layout)
    for seed in (10, 11, 12):  # a replay sees the slopes of each call
        check(case(length, seed=seed), kernel="triton")


@pytest.mark.gpu(1)
def test_one_gpu_is_exact() -> None:
    _on_gpus(0, 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_layout_and_pack_is_exact_over_nccl(ranks: int) -> None:
    run_ranks(ranks, _on_gpus, cuda=True, timeout=170)
