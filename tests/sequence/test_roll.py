"""Rolls between ranks with their gradients, and ranks whose layouts differ."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import max_logits, roll_sequence, unshard_sequence
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.masks import Span, Tile, union
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.recurrence import dist_conv
from dfa_megatron.sharding import layout_of_tokens
from tests.sequence.test_max_logits import uneven
from tests.support.packs import random_offsets
from tests.support.workers import over_ranks


def test_a_fill_that_a_dtype_lacks_is_refused() -> None:
    lacks = {
        torch.uint8: (-100, 0.5),
        torch.bool: (-100, 2),
        torch.int8: (0.5,),
        torch.int64: (0.5,),
        torch.bfloat16: (),
    }
    for dtype, fills in lacks.items():
        for fill in (*fills, 0, 1):
            if fill not in fills:
                assert roll_sequence(torch.ones(1, 4).to(dtype), 1, fill=fill)[0, 0] == fill
                continue
            with pytest.raises(UnsupportedError, match=f"fill={fill} in a tensor of {dtype}"):
                roll_sequence(torch.ones(1, 4).to(dtype), 1, fill=fill)


def rolled(whole: torch.Tensor, shift: int, offsets: tuple[int, ...], fill: float) -> torch.Tensor:
    """Token by token."""
    result = whole * 0 + fill
    for lo, hi in pairwise(offsets):
        for at in range(max(lo, lo + shift), min(hi, hi + shift)):
            result[:, at] = whole[:, at - shift]
    return result


def drawn(length: int, ranks: int, draw: random.Random) -> tuple[str | Layout, Layout]:
    """What a call is asked, and what it means: names where all ranks hold as many tokens."""
    name = draw.choice(["contiguous", "zigzag"])
    meant = draw.choice([layout_of_tokens(name, length, ranks), uneven(length, ranks, draw)])
    named = meant == layout_of_tokens(name, length, ranks) and length % (2 * ranks) == 0
    return (name if named else meant), meant


def compare_roll(rank: int, ranks: int, draw: random.Random) -> None:
    length = draw.choice([2 * ranks * draw.randint(1, 5), draw.randint(1, 9 * ranks)])
    offsets = draw.choice([(0, length), random_offsets(length, draw)])
    layout, meant = drawn(length, ranks, draw)
    packed = offsets if len(offsets) > 2 else None
    if packed and draw.random() < 0.5:
        layout, meant = "load_balanced", layout_of_tokens("load_balanced", length, ranks, packed)
    here = meant.positions(rank)
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


@over_ranks(1, 5)
def test_rolls_are_exact_with_their_gradients(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(25):
        compare_roll(rank, ranks, draw)
    if ranks == 1:
        return
    x = torch.ones(1, 4 - (rank == 1), 2)
    with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match="3 tokens on rank 1"):
        roll_sequence(x, 1, cu_seqlens=(0, 4 * ranks))
    heads = x[..., None, :].expand(-1, -1, 2, -1)
    for call in (partial(roll_sequence, x, 1), partial(max_logits, heads, heads, causal=True)):  # the group goes on
        with pytest.raises(DisagreementError, match=r"tokens of a rank: .*\n.*of_lengths"):
            call()
    with pytest.raises(DisagreementError, match="a roll by 7"):
        roll_sequence(x[:, :3], 7 + rank)


def even(length: int, ranks: int, draw: random.Random) -> Layout:
    """Give every rank as many tokens: some order of some blocks of the sequence."""
    block = draw.choice([1, 2, length // ranks])
    chunks = [Span(at, at + block) for at in range(0, length, block)]
    owners = sorted(at % ranks for at in range(len(chunks)))
    draw.shuffle(draw.choice([chunks, owners]))
    return Layout(tuple(chunks), tuple(owners))


@over_ranks(2, 3)
def test_layouts_masks_and_packs_that_differ_are_told_on_every_rank(rank: int, ranks: int) -> None:
    """Let one rank have another layout, mask or pack than the others, of as many tokens a rank, or the same name."""
    draw = random.Random(ranks)
    for _ in range(12):
        length, odd = 4 * ranks * draw.randint(1, 4), draw.randrange(ranks) == rank
        one, two = even(length, ranks, draw), even(length, ranks, draw)
        alike = [one.positions(at) for at in range(ranks)] == [two.positions(at) for at in range(ranks)]
        assert (str(one) == str(two)) == alike
        layout, x = (two if odd else one), torch.ones(1, length // ranks, 2, 8)
        keys, cube = Span(0, length - odd), torch.ones(2, 4, 4)
        mask, pack = union("mine", length, [Tile(Span(0, length), keys)]), (0, 1 + odd, length)
        for what, call in {
            "layout": partial(unshard_sequence, x, layout=layout),
            "roll": partial(roll_sequence, x, -1, layout=layout),
            "logits": partial(max_logits, x, x, causal=True, layout=layout),
            "mask": partial(max_logits, x, x, mask=mask),
            "pack": partial(unshard_sequence, x, layout="load_balanced", cu_seqlens=pack),
            "fill of a roll": partial(roll_sequence, cube, -1, fill=odd),
            "dim of a roll": partial(roll_sequence, cube, -1, dim=1 + odd),
            "dim of a convolution": partial(dist_conv, lambda x, _: x, cube, 2, dim=1 + odd),
        }.items():
            group = dist.new_group(list(range(ranks)))
            heard = alike and what in ("layout", "roll", "logits")
            try:
                call(group=group)
            except DisagreementError:
                heard = True
            assert heard, f"{what}: rank {rank} hears nothing of {one} and {two}"
