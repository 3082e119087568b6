"""Packed documents in real processes over gloo: results, and one clear error for bad input."""

from __future__ import annotations

import random

import pytest
import torch

import dfa_megatron
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.arguments import arguments, told
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


def attempt(rank: int, tokens: int, cu_seqlens: object, **options: object) -> str:
    """The error of one call as text, or nothing."""
    qkv = [torch.randn(tokens, heads, 16) for heads in (4, 2, 2)]
    return told(lambda: dfa_megatron.dist_flash_attn_varlen_func(*qkv, cu_seqlens, **arguments(**options)))


@over_ranks(2)
def test_a_wrong_pack_is_one_clear_error_on_every_rank(rank: int, ranks: int) -> None:
    def tensor(*offsets: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(offsets, dtype=dtype)

    odd = rank == ranks - 1
    report = {
        "decreasing": attempt(rank, 8, tensor(0, 9, 7, 16)),
        "empty document": attempt(rank, 8, tensor(0, 9, 9, 16)),
        "start": attempt(rank, 8, tensor(1, 9, 16)),
        "end": attempt(rank, 8, tensor(0, 9, 15)),
        "local": attempt(rank, 8, tensor(0, 3, 8)),
        "nothing": attempt(rank, 8, tensor()),
        "dtype": attempt(rank, 8, tensor(0, 9, 16, dtype=torch.int64)),
        "floats": attempt(rank, 8, (0, 9.5, 16)),
        "shape": attempt(rank, 8, tensor(0, 9, 16)[None]),
        "device": attempt(rank, 8, tensor(0, 9, 16).to("meta")),
        "differs": attempt(rank, 8, (0, 4 if odd else 5, 16)),
        "dtype of one": attempt(rank, 8, tensor(0, 3, 16, dtype=torch.int64 if odd else torch.int32)),
        "end of one": attempt(rank, 8, tensor(0, 2, 15 if odd else 16)),
        "good": attempt(rank, 8, tensor(0, 11, 16)),
    }
    assert report["good"] == report["empty document"] == ""
    for name, text in WRONG.items():
        assert text in report[name], f"{name}: {report[name]}"


WRONG = {
    "decreasing": "it may not fall, but document 1 would be tokens 9 to 7",
    "start": "it starts at 1, not at 0",
    "end": "8 queries on rank 1: its layout has 7 there",
    "local": "its layout has 4 there: contiguous of 4,4 tokens",
    "nothing": "there is no document",
    "dtype": "int32",
    "floats": "it must hold integers",
    "shape": r"shape (1, 3)",
    "device": "cu_seqlens on meta",
    "differs": "cu_seqlens (0, 4, 16) on rank 1",
    "dtype of one": "torch.int64",
    "end of one": "its layout has 7 there",
}
