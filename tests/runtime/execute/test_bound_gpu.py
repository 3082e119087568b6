"""Replays on GPUs: exact in bfloat16 with every kernel that a tape sees, over NCCL and copy engines, on any stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import DistAttentionConfig, kernels
from dfa_megatron.kernels import Need
from dfa_megatron.runtime import run
from dfa_megatron.runtime.prepare import in_use
from tests.runtime.comm.test_nccl import compare, gpu_case
from tests.runtime.execute.test_bound import lengths, recorded
from tests.support.arguments import arguments
from tests.support.packs import skip_unless_it_serves_this_gpu
from tests.support.workers import over_ranks

KERNELS = ("flash4", "triton", "cudnn", "aten")


def served(name: str) -> bool:
    """Whether the kernel is installed and takes what these tests ask for."""
    need = Need("cuda", torch.bfloat16, 4, 2, 128, 128, frozenset({"full", "causal"}), capability=(9, 0))
    return kernels.get(name).refusal(need) is None


def _again(rank: int, ranks: int, *, length: int = 512, **options: Any) -> None:
    """Five runs on fresh inputs: as it stands, recorded, replayed twice, and recorded again on another stream."""
    run._HAVE_RUN.clear()
    shape = {name: options.pop(name) for name in ("causal", "window_size") if name in options}
    for seed in range(5):
        whole = gpu_case(ranks * length, batch=2, heads=4, kv_heads=2, head_dim=128, seed=seed, **shape)
        stream = torch.cuda.Stream() if seed == 4 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compare(whole, rank, ranks, **shape, **options)
        torch.cuda.current_stream().wait_stream(stream)
        assert recorded(in_use()[-1]) == (0, 2, 2, 2, 4)[seed]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_replays_on_one_gpu_are_exact(kernel: str) -> None:
    skip_unless_it_serves_this_gpu(kernel)
    _again(0, 1, group="", kernel=kernel)
    if kernel != "cudnn":
        _again(0, 1, group="", kernel=kernel, causal=True, window_size=(100, 0))


@pytest.mark.support("runtime", "replays of recorded programs, over NCCL and copy engines")
@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["p2p", "copy_engine"])
@over_ranks(2, cuda=True, timeout=170)
def test_replays_between_gpus_are_exact(rank: int, ranks: int, transport: str) -> None:
    for kernel in filter(served, KERNELS):
        _again(rank, ranks, kernel=kernel, transport=transport, schedule="balanced_shared", ulysses_degree=1)
    for options in ({"schedule": "ring"}, {"layout": "zigzag"}, {"schedule": "balanced_shared", "ulysses_degree": 2}):
        _again(rank, ranks, transport=transport, **options)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kernel", ["flash4", "triton"])
@over_ranks(2, cuda=True, timeout=170, kernel=skip_unless_it_serves_this_gpu)
def test_replays_of_packs_between_gpus_repeat_the_first_run_to_the_bit(rank: int, ranks: int, kernel: str) -> None:
    """Packs that take turns: out, dq, dk and dv of replays are those of the first, unrecorded run, to the bit."""
    torch.use_deterministic_algorithms(True)
    length = ranks * 1024
    packs = ((0, length), (0, 300, 301, 1500, length), (0, 64, 128, 1000, 1024, length - 7, length))
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=1)
    generator = torch.Generator("cuda").manual_seed(rank)
    q, k, v, dout = (
        torch.randn(1024, h, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8)
    )
    first: dict[int, list[torch.Tensor]] = {}
    for turn in range(15):
        shard = [x.clone().requires_grad_() for x in (q, k, v)]
        out = dfa_megatron.dist_flash_attn_varlen_func(*shard, packs[turn % 3], causal=True, config=config)
        found = [out, *torch.autograd.grad(out, shard, dout)]
        for one, other in zip(found, first.setdefault(turn % 3, found), strict=True):
            assert torch.equal(one, other), f"turn {turn}"


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kernel", KERNELS)
@over_ranks(2, cuda=True, timeout=170, kernel=skip_unless_it_serves_this_gpu)
def test_a_new_pack_is_recorded_as_in_its_second_run(rank: int, ranks: int, kernel: str) -> None:
    """Packs that come once: what their first run records is what a second one would."""
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=1)
    shard = [torch.randn(1024, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2)]

    def both(number: int) -> list[int]:
        offsets = (0, 300 + number, 700, 1024 * ranks - 200 - number, 1024 * ranks)
        out: Any = dfa_megatron.dist_flash_attn_varlen_func(*shard, offsets, causal=True, config=config)
        torch.autograd.grad(out, shard, out)
        return lengths(in_use()[-1])

    for number in range(3):
        both(number)
    for number in range(3, 6):
        first = both(number)
        in_use()[-1].bound.clear()
        assert (len(first), both(number)) == (2, first)


@pytest.mark.gpu(1)
def test_a_replay_takes_no_more_memory_than_the_run_that_it_repeats() -> None:
    q, k, v = (torch.randn(1, 8192, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    peaks = []
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, group=""))
        torch.autograd.grad(out, (q, k, v), out)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out
    assert peaks[2] <= peaks[0]
    assert peaks[3] <= peaks[0]
