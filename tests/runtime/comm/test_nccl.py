"""GPUs over NCCL and over copy engines: exact in bfloat16, without a host synchronisation, under random load; packs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.support import attend
from tests.support.attend import Case, case
from tests.support.close import assert_close
from tests.support.packs import random_offsets, served, skip_unless_it_serves_this_gpu
from tests.support.workers import over_ranks, run_ranks, transports

TOLERANCE = 1e-2
"""bfloat16 inputs and outputs: 2 to 4e-3 is usual for attention and its gradients."""


DEVICE = "cuda"


def gpu_case(length: int, **options: Any) -> Case:
    """A case computed on the GPU, where dense float64 attention over thousands of tokens is quick."""
    return case(length, dtype=torch.bfloat16, device=DEVICE, **options)


def gpu_pack(offsets: tuple[int, ...], **options: Any) -> Case:
    return attend.pack(offsets, **{"heads": 8, "head_dim": 128, **options}, dtype=torch.bfloat16, device=DEVICE)


def compare(whole: Case, rank: int, ranks: int, **options: Any) -> None:
    attend.compare(whole, rank, ranks, tolerance=TOLERANCE, **options)


@pytest.mark.support(
    "runtime", "every schedule over NCCL and copy engines, with `cudnn`, `aten`, `reference`; 2, 3, 4 ranks"
)
@pytest.mark.gpu(2)
@over_ranks(2, 3, 4, cuda=True, timeout=170)
def test_every_schedule_and_kernel_is_exact_over_nccl(rank: int, ranks: int) -> None:
    for seed, (heads, kv_heads) in enumerate(((4, 4), (8, 2), (8, 1), (5, 5))):
        whole = gpu_case(ranks * 256, batch=2, heads=heads, kv_heads=kv_heads, head_dim=128, seed=seed)
        for kernel in ("cudnn", "aten", "reference"):
            for schedule in ("ring", "balanced", "balanced_shared"):
                compare(whole, rank, ranks, schedule=schedule, kernel=kernel)
            compare(whole, rank, ranks, layout="zigzag", kernel=kernel)
        for transport in transports(ranks):
            compare(whole, rank, ranks, schedule="balanced_shared", transport=transport)
            compare(whole, rank, ranks, schedule="ring", kernel="cudnn", transport=transport)
    window = gpu_case(ranks * 256, heads=4, kv_heads=2, head_dim=64, causal=True, window_size=(300, 0))
    compare(window, rank, ranks, window_size=(300, 0), kernel="aten")
    compare(window, rank, ranks, window_size=(300, 0), kernel="auto")


@pytest.mark.support("runtime", "the host is never waited for")
@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["p2p", "copy_engine"])
@over_ranks(2, cuda=True, timeout=120)
def test_the_loop_never_synchronises_the_host(rank: int, ranks: int, transport: str) -> None:
    whole = gpu_case(ranks * 512, batch=1, heads=8, kv_heads=2, head_dim=128)
    rows = slice(rank * 512, rank * 512 + 512)
    shard = [x[:, rows].clone().requires_grad_() for x in whole.inputs]

    def step() -> tuple[torch.Tensor, ...]:
        out = dfa_megatron.dist_flash_attn_func(*shard, causal=True, config=DistAttentionConfig(transport=transport))
        return (out, *torch.autograd.grad(out, shard, whole.dout[:, rows]))

    step()  # plans, agrees, makes communicators
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["num_alloc_retries"]
    assert allocated == 0
    assert_close(results[-1][0], whole.out[:, rows], tolerance=TOLERANCE)


def _stress(rank: int, ranks: int) -> None:
    draw = random.Random(4)
    for round_ in range(60):
        local = draw.choice([64, 128, 192, 256])
        heads, kv_heads = draw.choice([(4, 4), (4, 2), (8, 1), (3, 3)])
        schedule = draw.choice(["ring", "balanced", "balanced_shared"])
        whole = gpu_case(ranks * local, heads=heads, kv_heads=kv_heads, head_dim=draw.choice([64, 128]), seed=round_)
        # Other work on the same streams and devices, so that a missing wait has a chance to show.
        noise = torch.randn(1024, 1024, device=DEVICE)
        for _ in range(draw.randrange(4)):
            noise = noise @ noise * 1e-3
        compare(whole, rank, ranks, schedule=schedule, transport=draw.choice(transports(ranks)))


@pytest.mark.support("runtime", "random shapes under load, NCCL and copy engines")
@pytest.mark.gpu(2)
def test_random_shapes_under_load_are_never_wrong() -> None:
    run_ranks(max(2, min(4, torch.cuda.device_count())), _stress, cuda=True, timeout=170)


@pytest.mark.support("runtime", "deterministic gradients between ranks")
@pytest.mark.gpu(2)
@pytest.mark.parametrize("kernel", ["auto", "aten"])
@over_ranks(2, cuda=True, timeout=120)
def test_deterministic_gradients_are_equal_to_the_bit_on_gpus(rank: int, ranks: int, kernel: str) -> None:
    torch.use_deterministic_algorithms(True)
    whole = gpu_case(ranks * 512, heads=8, kv_heads=2, head_dim=128)
    attend.assert_same_bits(*(attend.results(whole, rank, ranks, kernel=kernel) for _ in range(4)))


@pytest.mark.support("runtime", "rematerialization between ranks")
@pytest.mark.gpu(2)
@pytest.mark.parametrize("packed", [False, True])
@over_ranks(2, cuda=True, timeout=120)
def test_rematerialization_repeats_no_forward_on_gpus(rank: int, ranks: int, packed: bool) -> None:
    torch.use_deterministic_algorithms(True)
    whole = gpu_pack((0, 70, 300, 256 * ranks)) if packed else gpu_case(256 * ranks, heads=8, kv_heads=8, head_dim=64)

    def checkpointed(region: Callable[..., Any], *qkv: torch.Tensor) -> Any:
        return remat.remat_checkpoint(lambda *inner: region(*(x * 1.0 for x in inner)), *qkv)

    plain = attend.results(whole, rank, ranks)
    COUNTERS.reset()
    attend.assert_same_bits(plain, attend.results(whole, rank, ranks, way=checkpointed))
    assert (COUNTERS.attention_forwards, COUNTERS.reused) == (1, 1)


def _captured_by_the_caller(rank: int, ranks: int, transport: str) -> None:
    """Replayed with other inputs, between calls that are not captured."""
    rows = slice(rank * 256, rank * 256 + 256)
    cases = [gpu_case(ranks * 256, heads=8, kv_heads=2, head_dim=128, seed=seed) for seed in range(4)]
    inputs = [x[:, rows].clone().requires_grad_() for x in cases[0].inputs]
    dout = cases[0].dout[:, rows].clone()
    config = DistAttentionConfig(schedule="balanced_shared", kernel="cudnn", transport=transport)

    def step() -> tuple[torch.Tensor, ...]:
        out = dfa_megatron.dist_flash_attn_func(*inputs, causal=True, config=config)
        return (out, *torch.autograd.grad(out, inputs, dout))

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # plans and compiles, records, replays
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = step()
    for whole in cases:
        with torch.no_grad():
            for held, x in zip((*inputs, dout), (*whole.inputs, whole.dout), strict=True):
                held.copy_(x[:, rows])
        graph.replay()
        for got, want in zip(results, (whole.out, *whole.gradients), strict=True):
            assert_close(got, want[:, rows], tolerance=TOLERANCE)
        compare(whole, rank, ranks, schedule="balanced_shared", kernel="cudnn", transport=transport)
    torch.cuda.synchronize()
    graph.reset()  # NCCL would wait for it without end


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["p2p", "copy_engine"])
def test_a_step_that_the_caller_captures_is_exact_at_every_replay(transport: str) -> None:
    run_ranks(max(2, min(4, torch.cuda.device_count())), _captured_by_the_caller, transport, cuda=True, timeout=170)


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
