"""Packed documents in real processes over gloo: results, and one clear error for bad input."""

from __future__ import annotations

import random

import pytest
import torch

import dfa_megatron
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.arguments import told
from tests.support.attend import attend, compare, pack
from tests.support.nan_memory import nan_memory
from tests.support.packs import random_offsets
from tests.support.workers import over_ranks

MASKS = ((True, (-1, -1)), (False, (-1, -1)), (True, (3, 0)), (False, (4, 2)))


@pytest.mark.support("runtime", "packed documents between processes")
@over_ranks(2, 3, 4)
def test_random_packs_are_exact_over_gloo(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    with nan_memory():
        for causal, window_size in MASKS:
            offsets = random_offsets(ranks * draw.randint(1, 6) * 2, draw)
            options = {"causal": causal, "window_size": window_size}
            for dtype in (torch.float64, torch.bfloat16):
                whole = pack(offsets, dtype=dtype, head_dim=32, seed=draw.randrange(99), **options)
                compare(whole, rank, ranks, kernel=draw.choice(["auto", "reference"]))
                compare(whole, rank, ranks, schedule="greedy")
        whole = pack(offsets, heads=6, kv_heads=1)
        compare(whole, rank, ranks, layout="zigzag")
        compare(whole, rank, ranks, layout="load_balanced")
        for degree in (2, 4) if ranks == 4 else ():
            compare(pack(random_offsets(ranks * 8, draw)), rank, ranks, ulysses_degree=degree)


@over_ranks(4)
def test_pairs_of_ranks_that_share_no_document_exchange_nothing(rank: int, ranks: int) -> None:
    whole = pack((0, 3, 6, 16, 18, 24))  # one document reaches over two ranks, 1 and 2
    COUNTERS.reset()
    attend(whole, *whole.shard(rank, ranks)[0], schedule="ring")
    assert COUNTERS.forward_messages == (rank == 1)


@over_ranks(2)
def test_a_wrong_pack_is_one_clear_error_on_every_rank(rank: int, ranks: int) -> None:
    def tensor(*offsets: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(offsets, dtype=dtype)

    qkv = [torch.randn(8, heads, 16) for heads in (4, 2, 2)]
    for given, why in (
        (tensor(0, 9, 7, 16), "it may not fall, but document 1 would be tokens 9 to 7"),
        (tensor(1, 9, 16), "it starts at 1, not at 0"),
        (tensor(0, 9, 15), "8 queries on rank 1: its layout has 7 there"),
        (tensor(0, 3, 8), "its layout has 4 there: contiguous of 4,4 tokens"),
        (tensor(), "there is no document"),
        (tensor(0, 9, 16, dtype=torch.int64), "int32"),
        ((0, 9.5, 16), "it must hold integers"),
        (tensor(0, 9, 16)[None], "shape (1, 3)"),
        (tensor(0, 9, 16).to("meta"), "cu_seqlens on meta"),
        ((0, 4 if rank else 5, 16), "cu_seqlens (0, 4, 16) on rank 1"),
        (tensor(0, 3, 16, dtype=torch.int64 if rank else torch.int32), "torch.int64"),
        (tensor(0, 2, 15 if rank else 16), "its layout has 7 there"),
        (tensor(0, 9, 9, 16), ""),  # a document without tokens
        (tensor(0, 11, 16), ""),
    ):
        text = told(lambda given=given: dfa_megatron.dist_flash_attn_varlen_func(*qkv, given, causal=True))  # type: ignore[misc]
        assert why in text if why else not text, (given, text)
