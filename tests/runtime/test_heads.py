"""Heads exchanged for tokens around the plan: exact for every count of heads, in every layout, and refused by name."""

from __future__ import annotations

import contextlib
import functools
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import layouts, remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.cost.hardware import H200_SLOW_LINK
from dfa_megatron.plan.degree import automatic_degree
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.runtime import prepare
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS
from tests.fuzz.attempt import Listens
from tests.runtime.comm.test_gloo import LAYOUTS
from tests.runtime.comm.test_nccl import compare as compare_on_gpu
from tests.runtime.comm.test_nccl import gpu_case, unsynchronised
from tests.support.attend import assert_same_bits, attend, case, compare, results
from tests.support.close import assert_close
from tests.support.nan_memory import nan_memory
from tests.support.workers import over_ranks, run_ranks

HEADS = ((4, 4), (8, 2), (8, 1), (12, 4), (12, 6), (12, 12))
"""(heads, kv_heads): multi-head, grouped, multi-query; 12 and 6 on 4 ranks give ranks unlike shares of kv heads."""


def test_a_single_process_has_nobody_to_exchange_with() -> None:
    with pytest.raises(UnsupportedError, match="group of 1 ranks"):
        compare(case(8), 0, 1, ulysses_degree=2)


def test_groups_whose_ranks_do_not_ascend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [3, 1])
    with pytest.raises(UnsupportedError, match=r"global ranks \[3, 1\].*ascend"):
        Channel(dist.ProcessGroup(0, 2), timedelta(seconds=1))


# Real processes over gloo.


@pytest.mark.support("runtime", "heads exchanged around a schedule (`ulysses_degree`)")
@pytest.mark.parametrize(("ranks", "degree"), [(3, 3), (4, 2), (4, 4)])
@over_ranks(timeout=120)
def test_every_count_of_heads_is_exact(rank: int, ranks: int, degree: int) -> None:
    """In every schedule, layout and mask."""
    with nan_memory():
        for seed, (heads, kv_heads) in enumerate(HEADS):
            if heads % degree == 0:
                whole = case(ranks * 6, heads=heads, kv_heads=kv_heads, head_dim=8, seed=seed)
                compare(whole, rank, ranks, ulysses_degree=degree)
        heads = 2 * degree
        for seed, (schedule, layout) in enumerate(LAYOUTS):
            for dtype in (torch.float64, torch.bfloat16)[: 1 + seed % 2]:
                whole = case(ranks * 10, dtype=dtype, heads=heads, kv_heads=1, seed=seed)
                compare(whole, rank, ranks, schedule=schedule, layout=layout, ulysses_degree=degree)
        for layout in ("contiguous", "zigzag"):
            whole = case(ranks * 10, heads=heads, causal=False, seed=9)
            compare(whole, rank, ranks, ulysses_degree=degree, layout=layout)
        for kernel in ("cpu", "reference"):
            whole = case(ranks * 10, heads=heads, window_size=(13, 0), batch=1, seed=10)
            compare(whole, rank, ranks, ulysses_degree=degree, kernel=kernel)
        # Odd widths, another width for v, and Megatron's strides.
        whole = case(ranks * 5, heads=heads, batch=3, head_dim=7, head_dim_v=5, first_in_memory="tokens")
        compare(whole, rank, ranks, ulysses_degree=degree, kernel="reference")


@over_ranks(4)
def test_exchanges_are_recorded_and_exact_when_they_are_replayed(rank: int, ranks: int) -> None:
    from dfa_megatron.runtime.execute.bound import Bound
    from dfa_megatron.runtime.prepare import in_use

    for layout, kv_heads in (("contiguous", 1), ("zigzag", 4)):
        for seed in range(3):  # recorded at the first
            whole = case(ranks * 8, heads=4, kv_heads=kv_heads, dtype=torch.bfloat16, seed=seed)
            compare(whole, rank, ranks, layout=layout, ulysses_degree=2)
    for prepared in in_use():
        assert prepared.exchange is not None
        assert [type(recorded) for recorded in prepared.bound.values()] == [Bound, Bound]


@over_ranks(4)
def test_subgroups_exchange_among_themselves_and_gradients_are_equal_to_the_bit_from_run_to_run(
    rank: int, ranks: int
) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    compare(case(24, seed=mine), rank // 2, 2, group=groups[mine], ulysses_degree=2)
    compare(case(24, seed=3), rank, ranks, ulysses_degree=2)
    torch.use_deterministic_algorithms(True)
    whole = case(ranks * 16, dtype=torch.float32, heads=4, kv_heads=1)  # kv heads are copied
    assert_same_bits(*(results(whole, rank, ranks, ulysses_degree=2) for _ in range(3)))


@over_ranks(2, 4)
def test_results_have_memory_of_their_own_in_uneven_and_empty_parts(rank: int, ranks: int) -> None:
    """Of whatever parts, also none: a result that is a view would hold a message, and an operator may return none."""
    draw = random.Random(ranks)
    for number in range(6):
        counts = [draw.choice((0, 3, 5)) for _ in range(ranks - 1)] + [4]
        held = layouts.of_lengths(draw.sample(counts, ranks)) if number % 3 else layouts.zigzag(8 * ranks, ranks)
        tokens, generator = held.tokens(rank), torch.Generator().manual_seed(rank)
        qkv = [torch.randn(1, tokens, 2, 8, generator=generator, requires_grad=True) for _ in range(3)]
        config = DistAttentionConfig(ulysses_degree=2)
        with Listens() if number % 2 else contextlib.nullcontext():
            out, lse = dfa_megatron.dist_flash_attn_func(*qkv, causal=True, layout=held, config=config, return_lse=True)
            found = [out.detach(), lse, *torch.autograd.grad(out.sum(), qkv)]
        storages = {x.untyped_storage().data_ptr() for x in found if x.numel()}
        assert len(storages) == sum(x.numel() > 0 for x in found)
        assert [x.untyped_storage().nbytes() for x in found] == [x.numel() * x.element_size() for x in found]


@over_ranks(4)
def test_an_exchange_makes_no_communicator_of_its_own(rank: int, ranks: int) -> None:
    from dfa_megatron.runtime.comm.groups import channel_of
    from dfa_megatron.runtime.prepare import in_use

    compare(case(ranks * 8), rank, ranks)
    plain = len(channel_of(None)._made)
    assert all(prepared.exchange is None for prepared in in_use())
    assert COUNTERS.ulysses_exchanges == COUNTERS.ulysses_forward_bytes == COUNTERS.ulysses_backward_bytes == 0
    for schedule in ("ring", "balanced"):
        compare(case(ranks * 10), rank, ranks, schedule=schedule, ulysses_degree=2)
    assert len(channel_of(None)._made) == plain


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("kernel", "payload"), [("cpu", "out"), ("reference", "delta")])
@over_ranks(4)
def test_bytes_on_the_wire_are_those_of_the_heads_that_leave(
    rank: int, ranks: int, kernel: str, payload: str, kv_heads: int
) -> None:
    """What was exchanged is kept for the backward where kv heads divide."""
    whole = case(ranks * 64, batch=1, heads=8, kv_heads=kv_heads, head_dim=32, dtype=torch.bfloat16)
    shard, _ = whole.shard(rank, ranks)
    COUNTERS.reset()
    attend(whole, *shard, schedule="ring", ulysses_degree=2, kernel=kernel).sum().backward()
    found, head, lse = COUNTERS.snapshot(), 64 * 32 * 2, 64 * 4 * 4
    read, again = lse if payload == "delta" else 4 * head, (4 + 1 + 1) * head if kv_heads == 1 else 0
    assert found["ulysses_exchanges"] == 4
    assert found["ulysses_forward_bytes"] == (4 + 1 + 1) * head + 4 * head + lse
    assert found["ulysses_backward_bytes"] == again + 4 * head + lse + read + (4 + 1 + 1) * head
    # The plan: the first of its two ranks sends one head of k and of v, of twice the tokens, to the second.
    assert found["forward_bytes"] == (4 * head if rank < 2 else 0)


# The planner's choice.


@over_ranks(4)
def test_the_automatic_degree_is_one_that_the_heads_allow(rank: int, ranks: int) -> None:
    """As on a slow link, where all ranks exchange if their heads allow it."""
    prepare.degree_of = lambda _request, _mask, over, x: automatic_degree(
        causal(8192 * over.size), over.size, x.q.shape[2], x.k.shape[2], "auto", H200_SLOW_LINK
    )
    exchanges = {}
    counts = (("many", 8, 8), ("grouped", 28, 4), ("two", 2, 2), ("thirty-three", 33, 33), ("one", 1, 1))
    for name, heads, kv_heads in counts:
        COUNTERS.reset()
        whole = case(ranks * 8, heads=heads, kv_heads=kv_heads)
        compare(whole, rank, ranks, ulysses_degree="auto")
        exchanges[name] = COUNTERS.ulysses_exchanges
    assert min(exchanges["many"], exchanges["grouped"], exchanges["two"]) > 0
    assert exchanges["thirty-three"] == exchanges["one"] == 0


# Agreement.


@over_ranks(4)
def test_ranks_whose_degrees_differ_or_do_not_divide_are_told_and_can_go_on(rank: int, ranks: int) -> None:
    with pytest.raises(DisagreementError, match=r"request.ulysses_degree: 1 on rank 0; 2 on ranks 1, 2, 3"):
        compare(case(ranks * 8), rank, ranks, ulysses_degree=1 if rank == 0 else 2)
    with pytest.raises(DisagreementError, match=r"request.ulysses_degree: 2 on ranks 0, 1, 2; 4 on rank 3"):
        compare(case(ranks * 8), rank, ranks, ulysses_degree=4 if rank == 3 else 2)
    with pytest.raises(UnsupportedError, match=r"ulysses_degree=2 with 33 heads"):
        compare(case(ranks * 2, heads=33, kv_heads=33), rank, ranks, ulysses_degree=2)
    one_of_them = UnsupportedError if rank == 2 else DisagreementError
    with pytest.raises(one_of_them, match=r"ulysses_degree=3 on a group of 4 ranks"):
        compare(case(ranks * 8), rank, ranks, ulysses_degree=3 if rank == 2 else 2)
    compare(case(ranks * 8), rank, ranks, ulysses_degree=2)


# Rematerialization and compilers.


def _region(*qkv: torch.Tensor) -> torch.Tensor:
    return dfa_megatron.dist_flash_attn_func(
        *(x * 1.0 for x in qkv), causal=True, config=DistAttentionConfig(ulysses_degree=2)
    )


@pytest.mark.parametrize("kv_heads", [1, 4])
@over_ranks(4)
def test_rematerialization_repeats_no_exchange(rank: int, ranks: int, kv_heads: int) -> None:
    whole = case(ranks * 8, heads=4, kv_heads=kv_heads)
    rows, (shard, _) = whole.rows(rank, ranks), whole.shard(rank, ranks)
    COUNTERS.reset()
    plain = torch.autograd.grad(_region(*shard), shard, whole.dout[:, rows])
    once = COUNTERS.snapshot()
    COUNTERS.reset()
    remat.remat_checkpoint(_region, *shard).backward(whole.dout[:, rows])
    again = COUNTERS.snapshot()
    assert all(torch.equal(x.grad, want) for x, want in zip(shard, plain, strict=True) if x.grad is not None)
    assert (again.pop("reused"), once.pop("reused")) == (1, 0)
    assert again.pop("remat_bytes") > once.pop("remat_bytes") == 0
    compared = functools.partial(checkpoint, use_reentrant=False, context_fn=remat.context_fn)  # what both passes save
    got = torch.autograd.grad(compared(_region, *shard), shard, whole.dout[:, rows])
    assert all(torch.equal(x, want) for x, want in zip(got, plain, strict=True))
    more = again.pop("ulysses_backward_bytes") - once.pop("ulysses_backward_bytes")
    assert again == once, "neither a kernel nor a message runs twice"
    assert once["ulysses_exchanges"] == 4
    # What was exchanged is not kept by a checkpoint: q, k and v travel with dout, of two heads and their kv heads.
    assert more == (0 if kv_heads == 1 else (2 + kv_heads // 2 * 2) * 8 * 16 * 8 * 2)


# GPUs over NCCL.


@pytest.mark.support("runtime", "heads exchanged around a schedule (`ulysses_degree`)")
@pytest.mark.gpu(2)
@over_ranks(2, 4, cuda=True, timeout=170)
def test_it_is_exact_over_nccl(rank: int, ranks: int) -> None:
    for degree in (d for d in (2, 4) if ranks % d == 0):
        for seed, (heads, kv_heads) in enumerate(((4, 4), (8, 2), (8, 1), (12, 6))):
            whole = gpu_case(ranks * 256, head_dim=128, heads=heads, kv_heads=kv_heads, seed=seed)
            for kernel in ("cudnn", "aten", "reference"):
                compare_on_gpu(whole, rank, ranks, kernel=kernel, ulysses_degree=degree)
            for transport in ("p2p", "auto"):
                compare_on_gpu(whole, rank, ranks, schedule="balanced", transport=transport, ulysses_degree=degree)
            compare_on_gpu(whole, rank, ranks, layout="zigzag", ulysses_degree=degree)
        window = gpu_case(ranks * 256, head_dim=128, heads=4, kv_heads=2, window_size=(300, 0))
        compare_on_gpu(window, rank, ranks, ulysses_degree=degree)


def _steady_on_gpus(rank: int, ranks: int) -> None:
    whole = gpu_case(ranks * 512, head_dim=128, batch=1, heads=8, kv_heads=1)
    rows = slice(rank * 512, rank * 512 + 512)
    shard = [x[:, rows].clone().requires_grad_() for x in whole.inputs]

    def step() -> tuple[torch.Tensor, ...]:
        out = dfa_megatron.dist_flash_attn_func(*shard, causal=True, config=DistAttentionConfig(ulysses_degree=2))
        return (out, *torch.autograd.grad(out, shard, whole.dout[:, rows]))

    for got, want in zip(unsynchronised(step, 5)[-1], (whole.out, *whole.gradients), strict=True):
        assert_close(got, want[:, rows], tolerance=1e-2)
    torch.use_deterministic_algorithms(True)
    runs = [step() for _ in range(4)]
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))

    plain = torch.autograd.grad(_region(*shard), shard, whole.dout[:, rows])
    COUNTERS.reset()
    remat.remat_checkpoint(_region, *shard).backward(whole.dout[:, rows])
    assert (COUNTERS.attention_forwards, COUNTERS.reused, COUNTERS.ulysses_exchanges) == (1, 1, 4)
    for x, want in zip(shard, plain, strict=True):
        assert x.grad is not None
        assert_close(x.grad, want.double(), tolerance=1e-2)


@pytest.mark.gpu(2)
def test_on_gpus_it_never_synchronises_the_host_nor_repeats_an_exchange() -> None:
    run_ranks(4 if torch.cuda.device_count() >= 4 else 2, _steady_on_gpus, cuda=True, timeout=170)
