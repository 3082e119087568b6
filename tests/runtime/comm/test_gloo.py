"""Real processes over gloo: the public functions against dense float64 attention, in all groups, and packs."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.arguments import arguments, told
from tests.support.attend import Results, assert_same_bits, attend, case, compare, pack, results
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
        (tensor(0, 9, 15), "cu_seqlens up to 15 with 8 tokens on rank 1: they are of all ranks together"),
        (tensor(0, 3, 8), "of which layout 'contiguous' gives this rank 4"),
        (tensor(), "there is no document"),
        (tensor(0, 9, 16, dtype=torch.int64), "int32"),
        ((0, 9.5, 16), "it must hold integers"),
        (tensor(0, 9, 16)[None], "shape (1, 3)"),
        (tensor(0, 9, 16).to("meta"), "cu_seqlens on meta"),
        ((0, 4 if rank else 5, 16), "cu_seqlens (0, 4, 16) on rank 1"),
        (tensor(0, 3, 16, dtype=torch.int64 if rank else torch.int32), "torch.int64"),
        (tensor(0, 2, 15 if rank else 16), "gives this rank 7"),
        (tensor(0, 9, 9, 16), ""),  # a document without tokens
        (tensor(0, 11, 16), ""),
    ):
        text = told(lambda given=given: dfa_megatron.dist_flash_attn_varlen_func(*qkv, given, causal=True))  # type: ignore[misc]
        assert why in text if why else not text, (given, text)


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self is Linux's")


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket on which this process listens."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that the listing itself held
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as held:
                if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and held.family != socket.AF_UNIX:
                    found.add(held.getsockname()[:2])
    return found


@LINUX
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 listening everywhere is to be seen
def test_a_listening_socket_is_seen(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        name = server.getsockname()
        assert name in listening()
    assert name not in listening()


@LINUX
@over_ranks(2)
def test_attention_opens_no_socket_on_another_interface_than_gloo_was_given_and_calls_todays_collectives(
    rank: int, ranks: int
) -> None:
    """Workers give it the loopback. Of every kind of message, forward and backward."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for options in ({}, {"schedule": "ring"}, {"ulysses_degree": 2}):
            q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
            dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, **options)).sum().backward()
        q, k, v = (torch.randn(8, 4, 8, requires_grad=True) for _ in range(3))
        dfa_megatron.dist_flash_attn_varlen_func(q, k, v, [0, 5, 8 * ranks], causal=True).sum().backward()
    assert [str(one.message) for one in said if issubclass(one.category, (FutureWarning, DeprecationWarning))] == []
    assert {address for address, _ in listening()} == {"127.0.0.1"}
