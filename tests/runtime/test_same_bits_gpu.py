"""numerics="invariant" on a GPU that plays all ranks, and on two: the bits of one rank, by every kernel that serves."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from dfa_megatron.plan.language.layout import Layout, contiguous, of_lengths, zigzag
from tests.support.attend import Case, Results, assert_exact, case, pack, results, shares
from tests.support.bits import differing, document, invariant, one_rank
from tests.support.packs import skip_unless_it_serves_this_gpu
from tests.support.workers import over_ranks

SHAPES = {"flash4": ((8, 2, 128), (4, 4, 64)), "triton": ((4, 2, 64),)}
CASES = {"flash4": 40, "triton": 6}


def drawn(dice: random.Random, kernel: str, number: int) -> Case:
    """Up to 9,000 tokens: a document, a window or a pack. Few are short enough for dense attention."""
    heads, kv_heads, head_dim = SHAPES[kernel][number % len(SHAPES[kernel])]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    tokens = dice.choice([700, 2049, 3000, 4096, 6000, 9000])
    if dice.random() < 0.4:
        ends = [*accumulate(dice.choice([1, 40, 700, 2048, 2300]) for _ in range(dice.randint(2, 6)))]
        return pack((0, *ends), seed=number, **shape)
    window = dice.choice([(-1, -1), (-1, -1), (1500, 0), (100, 0)])
    return case(tokens, batch=dice.choice([1, 2]), causal=dice.random() < 0.8, window_size=window, seed=number, **shape)


def layout_for(dice: random.Random, tokens: int, ranks: int) -> Layout:
    cuts = sorted(dice.choices(range(tokens + 1), k=ranks - 1))
    uneven = of_lengths([b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)])
    return dice.choice([contiguous(tokens, ranks), zigzag(tokens, ranks), uneven])


@pytest.mark.gpu
@pytest.mark.timeout(600)  # flash4 compiles for minutes
@pytest.mark.parametrize("kernel", CASES)
def test_every_rank_has_the_bits_of_one_rank(kernel: str) -> None:
    skip_unless_it_serves_this_gpu(kernel)
    dice, wrong = random.Random(kernel), list[str]()
    for number in range(CASES[kernel]):
        whole = drawn(dice, kernel, number)
        one = one_rank(whole, kernel=kernel)
        if whole.length <= 3000:
            assert_exact(shares(whole, one, drawn=True))
        for ranks in dice.sample([2, 3, 4, 5], 2):
            layout = layout_for(dice, whole.length, ranks)
            if names := differing(one, invariant(whole, ranks, layout, kernel=kernel)):
                wrong.append(f"case {number}, {whole.length} tokens on {ranks} ranks, {layout}: {names}")
        if whole.offsets:
            alone, tokens = document(whole, dice.randrange(len(whole.offsets) - 1))
            mine = [x[:, :, tokens] if x is one.lse else x[:, tokens] for x in one[:5]]
            if names := differing(type(one)(*mine), one_rank(alone, kernel=kernel)):
                wrong.append(f"case {number}: {names} of tokens {tokens} differ from the document alone")
    assert wrong == []


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", CASES)
@over_ranks(2, cuda=True, timeout=580)
def test_two_gpus_have_the_bits_of_one(rank: int, ranks: int, kernel: str) -> None:
    """Over NCCL and over copy engines; the third run of a case is a replay."""
    skip_unless_it_serves_this_gpu(kernel)
    dice, wrong = random.Random(f"two {kernel}"), list[str]()
    for number in range(CASES[kernel] // 2):
        whole = drawn(dice, kernel, number)
        layout = layout_for(dice, whole.length, ranks)
        one, rows = one_rank(whole, kernel=kernel), whole.rows(rank, ranks, layout)
        mine = Results(*(x[:, :, rows] if x is one.lse else x[:, rows] for x in one[:5]), None)
        for transport in ("p2p", "copy_engine"):
            asked = {"layout": layout, "kernel": kernel, "transport": transport, "numerics": "invariant"}
            for _ in range(3 if number % 3 == 0 else 1):
                if names := differing(mine, results(whole, rank, ranks, **asked)):
                    wrong.append(f"case {number}, {whole.length} tokens, {layout}, {transport}: {names}")
    assert wrong == []
