"""Sharding and its inverse: every layout, dtype, dimension and group, forward and backward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.sharding import local_positions, shard_sequence, unshard_sequence
from tests.support.arguments import assert_refused
from tests.support.workers import over_ranks

LAYOUTS = ("contiguous", "zigzag")
DTYPES = "float64 float32 bfloat16 float16 int64 int32 uint8 bool"


def brute_force(layout: str, length: int, ranks: int, rank: int) -> list[int]:
    """The positions a rank holds, written down as the layouts are described."""
    if layout == "contiguous":
        return list(range(rank * length // ranks, (rank + 1) * length // ranks))
    chunk_length = length // (2 * ranks)
    return [
        p for chunk in (rank, 2 * ranks - 1 - rank) for p in range(chunk * chunk_length, (chunk + 1) * chunk_length)
    ]


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 200).to(dtype)


@over_ranks(1, 2, 3)
def test_unshard_inverts_shard_for_every_layout_dtype_and_dimension(rank: int, world_size: int) -> None:
    length = 12 * world_size
    for seed, dtype in enumerate(getattr(torch, name) for name in DTYPES.split()):
        for layout in LAYOUTS:
            for dim in (0, 1, -1):
                shape = [2, 3, 5]
                shape[dim] = length
                whole = sample(tuple(shape), dtype, seed)
                local = shard_sequence(whole, layout=layout, dim=dim)
                here = torch.tensor(brute_force(layout, length, world_size, rank))
                assert torch.equal(local, whole.index_select(dim, here))
                shares_memory = local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                assert not shares_memory or world_size == 1, "a shard does not keep the whole alive"
                assert torch.equal(local_positions(length, layout=layout), here)
                back = unshard_sequence(local.transpose(0, 2).contiguous().transpose(0, 2), layout=layout, dim=dim)
                assert torch.equal(back, whole)
                assert back.dtype == dtype


@over_ranks(1, 3)
def test_packs_are_sharded_in_every_layout_and_come_back(rank: int, world_size: int) -> None:
    """Every layout of a pack: positions count in the documents, and the way back is exact."""
    draw = random.Random(world_size)
    for layout in (*LAYOUTS, "load_balanced"):
        length = 6 * world_size
        offsets = (0, *sorted(draw.sample(range(1, length), draw.randint(0, 4))), length)
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        starts = torch.tensor([max(start for start in offsets if start <= token) for token in range(length)])
        whole = sample((length, 3), torch.float32, world_size)
        local = shard_sequence(whole, layout=layout, dim=0, cu_seqlens=cu_seqlens)
        assert len(local) == 6
        assert torch.equal(unshard_sequence(local, layout=layout, dim=0, cu_seqlens=offsets), whole)
        mine = shard_sequence(torch.arange(length), layout=layout, dim=0, cu_seqlens=offsets)
        assert torch.equal(local, whole[mine])
        positions = local_positions(length, layout=layout, cu_seqlens=cu_seqlens)
        assert torch.equal(positions, mine - starts[mine])


@pytest.mark.parametrize(("ranks", "layout"), [(2, "contiguous"), (3, "zigzag")])
@over_ranks()
def test_gradients_are_those_of_the_dense_loss_in_every_convention(rank: int, world_size: int, layout: str) -> None:
    """Gradients of a nonlinear loss of the whole under three conventions, all of which should give the dense one."""
    x = sample((2, 4 * world_size, 3), torch.float64, world_size) / 100
    weight = sample((2, 4 * world_size, 3), torch.float64, 50 + world_size)

    def loss_of(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (w * (t * t.roll(1, dims=1)).sin()).sum()

    dense = x.clone().requires_grad_()
    loss_of(dense, weight).backward()

    same = x.clone().requires_grad_()  # every rank has the same loss, gradients are averaged
    loss_of(unshard_sequence(shard_sequence(same, layout=layout), layout=layout), weight).backward()
    assert same.grad is not None
    elsewhere = torch.ones(4 * world_size, dtype=torch.bool)
    elsewhere[local_positions(4 * world_size, layout=layout)] = False
    assert same.grad[:, elsewhere].eq(0).all()
    dist.all_reduce(same.grad)

    one = x.clone().requires_grad_()  # one rank has the loss
    last = float(rank == world_size - 1)
    (last * loss_of(unshard_sequence(shard_sequence(one, layout=layout), layout=layout), weight)).backward()
    dist.all_reduce(one.grad)

    mine = x.clone().requires_grad_()  # each rank has the loss of its own tokens
    whole = unshard_sequence(shard_sequence(mine, layout=layout), layout=layout)
    terms = weight * (whole * whole.roll(1, dims=1)).sin()
    shard_sequence(terms, layout=layout).sum().backward()
    dist.all_reduce(mine.grad)
    for found in (same.grad / world_size, one.grad, mine.grad):
        torch.testing.assert_close(found, dense.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.gpu(2)
@over_ranks(2, cuda=True)
def test_gpus_shard_and_unshard_over_nccl(rank: int, world_size: int) -> None:
    x = sample((2, 8 * world_size, 3), torch.float32, 1)
    for layout in LAYOUTS:
        leaf = x.cuda().requires_grad_()
        local = shard_sequence(leaf, layout=layout)
        whole = unshard_sequence(local, layout=layout)
        assert torch.equal(whole.cpu(), x)
        (whole * (rank + 1)).sum().backward()
        here = local_positions(8 * world_size, layout=layout, device="cuda")
        assert leaf.grad is not None
        assert leaf.grad[:, here].eq(sum(range(1, world_size + 1))).all()
        assert leaf.grad.count_nonzero() == local.numel()


@over_ranks(4)
def test_group_ranks_decide_not_global_ranks(rank: int, world_size: int) -> None:
    """Two groups of two whose group ranks are not the global ranks, used at the same time."""
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    mine = groups[0] if rank in (1, 3) else groups[1]
    other = groups[1] if mine is groups[0] else groups[0]
    whole = sample((1, 8, 2), torch.float32, rank % 2)
    for layout in LAYOUTS:
        here = brute_force(layout, 8, 2, dist.get_rank(mine))
        for group in (mine, mine.group_name):
            local = shard_sequence(whole, group=group, layout=layout)
            assert torch.equal(local, whole[:, here])
            assert torch.equal(unshard_sequence(local, group=group, layout=layout), whole)
            assert local_positions(8, group=group, layout=layout).tolist() == here
    assert_refused("this rank is no member of", shard_sequence, whole, group=other)


@over_ranks(2)
def test_ranks_that_differ_are_all_told_how(rank: int, world_size: int) -> None:
    """What this rank is told for each way to differ; the group works on afterwards."""
    told = []
    cases: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (torch.zeros(1, 2 + 2 * rank), {}),
        (torch.zeros(1, 2, dtype=torch.float32 if rank else torch.float64), {}),
        (torch.zeros(2, 2), {"dim": rank % 2}),
        (torch.zeros(1, 2), {"layout": LAYOUTS[rank % 2]}),
        (torch.zeros((1, 2) if rank else (1, 2, 1)), {}),
        (torch.zeros(1, 2), {"dim": 1 + 4 * rank}),
    ]
    for x, options in cases:
        with pytest.raises(UnsupportedError if options.get("dim") == 5 else DisagreementError) as caught:
            unshard_sequence(x, **options)
        told.append(str(caught.value))
    assert torch.equal(unshard_sequence(torch.full((1, 1), float(rank))), torch.arange(float(world_size))[None])
    assert "tokens by rank [2, 4]" in told[0]
    fields = (
        "dtype: torch.float64 on rank 0; torch.float32 on rank 1",
        "dim: 0",
        "layout: contiguous",
        "shape: (1, 1)",
    )
    assert all(f"  {field}" in text for field, text in zip(fields, told[1:5], strict=True)), told
    assert (
        "dim=5 of a tensor" if rank else "rank 1 of the group refuses this attention: Not supported: dim=5"
    ) in told[5]


@over_ranks(4)
def test_gradients_in_half_precision_are_summed_in_float32(rank: int, world_size: int) -> None:
    """256 + 1 + 1 + 1 is 259, nearest bfloat16 260; adding one at a time in bfloat16 stays at 256."""
    local = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (unshard_sequence(local) * (256.0 if rank == 0 else 1.0)).sum().backward()
    assert local.grad is not None
    assert local.grad.float().eq(260).all()


def test_without_torch_distributed_there_is_one_rank() -> None:
    x = torch.randn(2, 6, 3, requires_grad=True)
    for layout in LAYOUTS:
        assert shard_sequence(x, layout=layout) is x
        assert unshard_sequence(x, layout=layout) is x
        assert local_positions(6, layout=layout).tolist() == list(range(6))


@over_ranks(3)
def test_what_cannot_be_sharded_is_refused_with_what_works(rank: int, world_size: int) -> None:
    assert_refused("there is nothing to share", shard_sequence, torch.zeros(1, 0))
    for name in ("spiral", "load_balanced"):
        assert_refused("load_balanced with cu_seqlens", shard_sequence, torch.zeros(1, 9), layout=name)
    with pytest.raises(UnsupportedError, match=r"cu_seqlens of dtype torch\.int64"):
        shard_sequence(torch.zeros(1, 9), cu_seqlens=torch.tensor([0, 9]))
    assert_refused("it ends at 8, but", unshard_sequence, torch.zeros(1, 3), cu_seqlens=(0, 8))
    assert_refused("dim=2 of a tensor with 2 dimensions", shard_sequence, torch.zeros(1, 9), dim=2)
