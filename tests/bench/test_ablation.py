"""Ablations of the benchmarks: right without overlap, wrong without messages, gone afterwards."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import dfa_megatron
from benchmarks.attention.ablation import ablation
from tests.support.attend import case
from tests.support.close import assert_close
from tests.support.workers import over_ranks


@over_ranks(3)
def test_without_overlap_results_are_right_and_without_communication_they_are_not(rank: int, ranks: int) -> None:
    whole = case(ranks * 8)
    shard, want = [x[:, rank * 8 : rank * 8 + 8] for x in whole.inputs], whole.out[:, rank * 8 : rank * 8 + 8]
    for name in ("no_overlap", "no_communication", ""):
        with ablation(name) if name else nullcontext():
            out = dfa_megatron.dist_flash_attn_func(*shard, causal=True)
        if name == "no_communication":
            assert rank == 0 or not torch.allclose(out, want)
        else:
            assert_close(out, want, tolerance=1e-12)
