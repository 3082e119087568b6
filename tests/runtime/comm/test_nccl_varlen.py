"""Packed documents over NCCL and over copy engines: exact in bfloat16 with every kernel, without stopping the host."""

from __future__ import annotations

import functools
import random
from itertools import pairwise

import pytest
import torch

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.runtime.comm.test_nccl import DEVICE, TOLERANCE, compare, gpu_pack
from tests.support.close import assert_close
from tests.support.packs import random_offsets, served, skip_unless_it_serves_this_gpu
from tests.support.workers import over_ranks, transports


@pytest.mark.support("runtime", "packed documents between processes")
@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)])
@pytest.mark.parametrize("kernel", ["flash4", "aten", "triton", "cudnn"])
@over_ranks(cuda=True, timeout=400, kernel=skip_unless_it_serves_this_gpu)  # they compile for every kind of pack
def test_random_packs_are_exact_over_nccl(rank: int, ranks: int, kernel: str) -> None:
    draw, done = random.Random(ranks), 0
    for round_ in range(4):
        offsets = random_offsets(ranks * draw.choice([64, 130, 256, 384]), draw)
        heads, kv_heads = draw.choice([(8, 2), (4, 4), (6, 1)])
        whole = gpu_pack(offsets, heads=heads, kv_heads=kv_heads, seed=round_)
        options = {"kernel": kernel, "transport": draw.choice(transports(ranks))}
        for schedule, layout in (("ring", "contiguous"), ("greedy", "contiguous"), ("auto", "load_balanced")):
            call = functools.partial(compare, whole, rank, ranks, schedule=schedule, layout=layout, **options)
            done += served(kernel, call)
        if kernel != "cudnn":
            for causal, window_size in ((False, (-1, -1)), (True, (70, 0)), (False, (30, 9))):
                seen = {"causal": causal, "window_size": window_size}
                bounded = gpu_pack(offsets, heads=heads, kv_heads=kv_heads, seed=round_, **seen)
                compare(bounded, rank, ranks, **options)
    assert done


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["p2p", "copy_engine"])
@over_ranks(2, cuda=True, timeout=120)
def test_packs_never_synchronise_the_host(rank: int, ranks: int, transport: str) -> None:
    offsets = (0, 3, 100, 101, 700, ranks * 512)
    whole, rows = gpu_pack(offsets), slice(rank * 512, rank * 512 + 512)
    shard = [x[0, rows].clone().requires_grad_() for x in whole.inputs]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)

    def step(cu_seqlens: torch.Tensor | tuple[int, ...]) -> torch.Tensor:
        out = dfa_megatron.dist_flash_attn_varlen_func(
            *shard, cu_seqlens, causal=True, softmax_scale=0.3, config=DistAttentionConfig(transport=transport)
        )
        torch.autograd.grad(out, shard, whole.dout[0, rows])
        return out

    step(cu_seqlens)  # plans, agrees, makes communicators, reads the tensor
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [step(cu_seqlens) for _ in range(3)]
        step((0, 3, 102, 103, 702, ranks * 512))  # a new pack of numbers stops nothing either
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(again[-1], whole.out[0, rows], tolerance=TOLERANCE)


@pytest.mark.gpu(2)
@over_ranks(2, cuda=True, timeout=120)
def test_documents_inside_a_rank_are_one_kernel_call_and_no_message(rank: int, ranks: int) -> None:
    lengths = [17, 200, 1, 90, 204] * ranks
    offsets = tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
    assert all(offsets[5 * r] == 512 * r for r in range(ranks))
    whole, rows = gpu_pack(offsets), slice(rank * 512, rank * 512 + 512)
    COUNTERS.reset()
    dfa_megatron.dist_flash_attn_varlen_func(
        *(x[0, rows] for x in whole.inputs), offsets, causal=True, config=DistAttentionConfig(schedule="ring")
    )
    assert COUNTERS.kernel_forwards == 1
    assert COUNTERS.forward_messages == 0
    assert [hi - lo for lo, hi in pairwise(offsets)] == lengths


@pytest.mark.gpu(2)
@over_ranks(2, cuda=True, timeout=120)
def test_a_tensor_of_offsets_that_is_written_to_is_read_again(rank: int, ranks: int) -> None:
    first, second = (0, 40, 128 * ranks), (0, 90, 128 * ranks)
    cu_seqlens = torch.tensor(first, dtype=torch.int32, device=DEVICE)
    rows = slice(rank * 128, rank * 128 + 128)
    for offsets in (first, second):
        cu_seqlens.copy_(torch.tensor(offsets))
        whole = gpu_pack(offsets)
        out = dfa_megatron.dist_flash_attn_varlen_func(
            *(x[0, rows] for x in whole.inputs), cu_seqlens, causal=True, softmax_scale=0.3
        )
        assert_close(out, whole.out[0, rows], tolerance=TOLERANCE)
