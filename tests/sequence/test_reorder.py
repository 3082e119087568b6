"""Tokens that move between ranks: rolls and other layouts with their gradients, and what pages say in two lines."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from dfa_megatron import reshard, roll_sequence
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.sharding import layout_of_tokens
from tests.sequence.test_max_logits import uneven
from tests.support.packs import random_offsets
from tests.support.workers import run_ranks


def rolled(whole: torch.Tensor, shift: int, offsets: tuple[int, ...], fill: float) -> torch.Tensor:
    """Token by token."""
    result = whole * 0 + fill
    for lo, hi in pairwise(offsets):
        for at in range(max(lo, lo + shift), min(hi, hi + shift)):
            result[:, at] = whole[:, at - shift]
    return result


def held(layout: Layout, rank: int) -> list[int]:
    return layout.positions(rank) if rank < layout.ranks else []


def compare_roll(rank: int, ranks: int, draw: random.Random) -> None:
    length = 2 * ranks * draw.randint(1, 5)
    offsets = draw.choice([(0, length), random_offsets(length, draw)])
    layout: Any = draw.choice(["contiguous", "zigzag", "load_balanced", uneven(length, ranks, draw)])
    packed = offsets if layout == "load_balanced" or len(offsets) > 2 else None
    here = held(layout if isinstance(layout, Layout) else layout_of_tokens(layout, length, ranks, packed), rank)
    shift, dim = draw.choice([-1, 1, draw.randint(-length - 2, length + 2)]), draw.choice([1, -2])
    seed = torch.Generator().manual_seed(draw.randrange(1000))
    whole, weight = torch.randn(2, 2, length, 3, generator=seed, dtype=torch.float64)
    leaf, mine = whole.clone().requires_grad_(), whole[:, here].requires_grad_()
    want = rolled(leaf, shift, offsets, 0.5)
    got = roll_sequence(mine, shift, layout=layout, dim=dim, cu_seqlens=packed, fill=0.5)
    assert got.is_contiguous()
    assert torch.equal(got, want[:, here])
    (want * weight).sum().backward()
    (got * weight[:, here]).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(mine.grad, leaf.grad[:, here])
    labels = torch.randint(0, 9, (1, length), generator=seed)
    ours = roll_sequence(labels[:, here], shift, layout=layout, cu_seqlens=packed, fill=-100)
    assert torch.equal(ours, rolled(labels, shift, offsets, -100)[:, here])


def compare_reshard(rank: int, ranks: int, draw: random.Random) -> None:
    length = 2 * ranks * draw.randint(1, 5)
    source, target = (
        draw.choice([layout_of_tokens("zigzag", length, ranks), uneven(length, ranks, draw)]) for _ in range(2)
    )
    seed = torch.Generator().manual_seed(draw.randrange(1000))
    whole, weight = torch.randn(2, length, 2, 3, generator=seed, dtype=torch.float64)
    mine = whole[held(source, rank)].requires_grad_()
    there = reshard(mine, source, target, dim=0)
    assert torch.equal(there, whole[held(target, rank)])
    assert torch.equal(reshard(there.bool(), target, source, dim=0), mine.bool())
    (there * weight[held(target, rank)]).sum().backward()
    assert torch.equal(mine.grad, weight[held(source, rank)])


def _draws(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(25):
        compare_roll(rank, ranks, draw)
        compare_reshard(rank, ranks, draw)


def _all(rank: int, ranks: int) -> None:
    _draws(rank, ranks)
    x = torch.ones(1, 4 - (rank == 1), 2)
    with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match="3 tokens on rank 1"):
        roll_sequence(x, 1, cu_seqlens=(0, 4 * ranks))
    with pytest.raises(DisagreementError, match="a roll by 7"):
        roll_sequence(x[:, :3], 7 + rank)


def test_rolls_and_other_layouts_are_exact_with_their_gradients() -> None:
    _draws(0, 1)
    run_ranks(5, _all)
