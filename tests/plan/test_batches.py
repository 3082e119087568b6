"""Micro-batches are planned whole, within their tokens, evenly, and compute what one process does."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import dist_flash_attn_varlen_func, plan_batches, shard_sequence
from dfa_megatron.batches import LayerCost, MicroBatch
from dfa_megatron.errors import UnsupportedError
from tests.support.workers import run_ranks

Draw = tuple[list[int], int, int, tuple[int, ...]]


def draws() -> list[Draw]:
    """Lengths, ranks, tokens of a rank and sizes of groups: few and many samples, short and long ones, odd groups."""
    numbers, found = random.Random(3), list[Draw]()
    for ranks, sizes in ((4, (1, 2, 4)), (6, (1, 3, 6)), (8, (2, 4)), (8, (1,)), (12, (1, 2, 6, 12)), (16, (1, 4, 16))):
        for samples, spread in ((1, 1.0), (5, 0.5), (90, 1.0), (90, 3.0)):
            most = sizes[-1] * 512
            lengths = [max(1, int(most * numbers.random() ** spread)) for _ in range(samples)]
            found.append(([*lengths, 1, most], ranks, 512, sizes))
    return found


@pytest.mark.parametrize("draw", draws(), ids=lambda draw: f"{len(draw[0])} samples on {draw[1]} ranks by {draw[3]}")
def test_each_sample_is_planned_once_in_aligned_groups_that_hold_it(draw: Draw) -> None:
    lengths, ranks, tokens, sizes = draw
    plan = plan_batches(lengths, ranks, tokens, sizes)
    assert sorted(n for batch in plan for group in batch for n in group.samples) == list(range(len(lengths)))
    for batch in plan:
        assert [rank for group in batch for rank in group.ranks] == list(range(ranks))
        for group in batch:
            assert len(group.ranks) in sizes
            assert group.ranks[0] % len(group.ranks) == 0
            assert sum(lengths[n] for n in group.samples) <= tokens * len(group.ranks)
        busy = [group for group in batch if group.samples]
        assert busy
        assert len(busy) == len(batch) or {len(group.ranks) for group in busy} == {sizes[-1]}
    assert plan == plan_batches(lengths, ranks, tokens, sizes)


def log_normal(count: int, most: int) -> list[int]:
    numbers = random.Random(0)
    return [min(max(int(numbers.lognormvariate(7.8, 1.0)), 1024), most) for _ in range(count)]


@pytest.mark.parametrize(("ranks", "a_rank", "bound"), [(4, 16, 1.07), (16, 16, 1.08), (16, 2, 1.2), (64, 1, 1.2)])
def test_a_step_is_nearly_as_short_as_if_all_ranks_were_busy(ranks: int, a_rank: int, bound: float) -> None:
    layer, lengths = LayerCost(), log_normal(a_rank * ranks, 16384)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= ranks]
    clock = [0.0] * ranks
    for batch in plan_batches(lengths, ranks, 4096, sizes):
        for group in batch:
            end = max(clock[rank] for rank in group.ranks) + group.seconds
            for rank in group.ranks:
                clock[rank] = end
    fewest = [next(size for size in sizes if length <= 4096 * size) for length in lengths]
    busy = sum(layer.share(length, size) * size for length, size in zip(lengths, fewest, strict=True)) / ranks
    assert busy < max(clock) < bound * busy


@pytest.mark.parametrize(
    ("lengths", "sizes", "said"),
    [
        ([5, 0], (1, 2), r"sample 1 of 0 tokens .*holds 1 to 20, 10 a rank"),
        ([21], (1, 2), r"sample 0 of 21 tokens .*a group of 2 ranks"),
        ([5], (2, 3), r"sizes \[2, 3\] on 4 ranks .*do not nest"),
        ([5], (), r"sizes \[\] on 4 ranks"),
        ([5], (3,), r"sizes \[3\] on 4 ranks"),
    ],
)
def test_samples_that_no_group_holds_and_sizes_that_do_not_nest_are_refused(
    lengths: list[int], sizes: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said.replace(" .*", ".*")):
        plan_batches(lengths, 4, 10, sizes)


def test_one_sample_has_all_ranks_and_no_sample_no_micro_batch() -> None:
    ((group,),) = plan_batches([10], 4, 10, (1, 2, 4))
    assert (group.ranks, group.samples) == (range(4), (0,))
    assert plan_batches([], 4, 10, (1, 2, 4)) == []
    assert [group.samples for group in plan_batches([10], 4, 10, (1, 2))[0]] == [(0,), (), ()]


LENGTHS = [40, 37, 17, 9, 9, 5, 3, 1, 1, 20, 19, 18, 20, 17, 3, 2]
RANKS, SIZES = 4, (1, 2)


def planned() -> list[MicroBatch]:
    return plan_batches(LENGTHS, RANKS, 20, SIZES)


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a sample's tokens, and what its outputs are weighed by."""
    generator = torch.Generator().manual_seed(number)
    states, weights = torch.randn(2, LENGTHS[number], 16, generator=generator, dtype=torch.float64)
    return states, weights


def projections() -> torch.Tensor:
    made = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(99), dtype=torch.float64) / 4
    return made.requires_grad_()


def step(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on the packs of this rank's groups, and add up losses and gradients."""
    groups = {size: dist.new_subgroups(size)[0] for size in SIZES}
    maps, total = projections(), torch.zeros((), dtype=torch.float64)
    for batch in planned():
        (own,) = (group for group in batch if rank in group.ranks)
        if not own.samples:
            continue
        offsets = (0, *accumulate(LENGTHS[n] for n in own.samples))
        split = {"group": groups[len(own.ranks)], "cu_seqlens": offsets}
        whole = map(torch.cat, zip(*map(sample, own.samples), strict=True))
        states, weights = (shard_sequence(each, dim=0, **split) for each in whole)
        q, k, v = (states @ maps).unflatten(-1, (2, 8))
        out = dist_flash_attn_varlen_func(q, k, v, offsets, group=split["group"], causal=True)
        loss = (out.flatten(1) * weights).sum()
        loss.backward()
        total += loss.detach()
    assert maps.grad is not None
    for value in (total, maps.grad):
        dist.all_reduce(value)
    return total, maps.grad


def test_the_loss_and_gradients_of_planned_groups_are_those_of_one_process() -> None:
    sizes = [[len(group.ranks) for group in batch if group.samples] for batch in planned()]
    assert [2, 2] in sizes
    assert any(1 in each for each in sizes)
    maps, total = projections(), torch.zeros((), dtype=torch.float64)
    for number in range(len(LENGTHS)):
        states, weights = sample(number)
        q, k, v = (states @ maps).unflatten(-1, (2, 8)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        total = total + (out.transpose(0, 1).flatten(1) * weights).sum()
    total.backward()
    for loss, gradient in run_ranks(RANKS, step):
        torch.testing.assert_close(loss, total.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient, maps.grad, rtol=1e-10, atol=1e-10)
