"""Ablations of the benchmarks: right without overlap, wrong without messages, gone afterwards."""

from __future__ import annotations

import torch

import dfa_megatron
from benchmarks.attention.ablation import ablation
from tests.support.attend import case
from tests.support.close import assert_close
from tests.support.workers import over_ranks


@over_ranks(3)
def test_without_overlap_results_are_right_and_without_communication_they_are_not(rank: int, ranks: int) -> None:
    whole = case(ranks * 8)
    shard = [x[:, rank * 8 : rank * 8 + 8] for x in whole.inputs]
    with ablation("no_overlap"):
        assert_close(
            dfa_megatron.dist_flash_attn_func(*shard, causal=True),
            whole.out[:, rank * 8 : rank * 8 + 8],
            tolerance=1e-12,
        )
    with ablation("no_communication"):
        out = dfa_megatron.dist_flash_attn_func(*shard, causal=True)
    assert rank == 0 or not torch.allclose(out, whole.out[:, rank * 8 : rank * 8 + 8])
    assert_close(
        dfa_megatron.dist_flash_attn_func(*shard, causal=True), whole.out[:, rank * 8 : rank * 8 + 8], tolerance=1e-12
    )
