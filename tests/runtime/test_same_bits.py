"""numerics="invariant": the bits of out, lse and gradients are those of one rank, whatever ranks, layouts and packs."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import layouts, masks
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.adapters.cpu import CpuKernel
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.program import Call
from dfa_megatron.recurrence import dist_conv
from dfa_megatron.runtime.execute.tensors import Tensors
from tests.support.attend import Case, Results, assert_exact, case, pack, results, shares
from tests.support.bits import compare_drawn, differing, document, invariant, one_rank
from tests.support.packs import drawn_layout, skip_unless_it_serves_this_gpu
from tests.support.workers import over_ranks, run_ranks, transports


def _same(whole: Case, rank: int, ranks: int, layout: str | Layout = "contiguous", **options: Any) -> None:
    """Compare this rank's part with its rows of what one rank computes; collective."""
    one, times = one_rank(whole), 3 if options.pop("replayed", False) else 1
    rows, columns = (whole.rows(rank, ranks, layout, side) for side in ("q", "kv"))
    want = Results(one.out[:, rows], one.lse[:, :, rows], one.dq[:, rows], one.dk[:, columns], one.dv[:, columns])
    for _ in range(times):
        got = results(whole, rank, ranks, layout=layout, numerics="invariant", **options)
        assert differing(got, want._replace(dsinks=one.dsinks)) == []


def _over_gloo(rank: int, ranks: int) -> None:
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        whole = case(ranks * 42, dtype=dtype, seed=seed, heads=4, kv_heads=2)
        _same(whole, rank, ranks, replayed=True)
        _same(whole, rank, ranks, "zigzag")
    _same(whole, rank, ranks, schedule="balanced", verify="off")
    _same(case(ranks * 30, with_sinks=True, dtype=torch.float32), rank, ranks)
    _same(case(ranks * 40, window_size=(25, 0), batch=1), rank, ranks)
    offsets = (0, 7, 60, 61, ranks * 31)
    _same(pack(offsets, dtype=torch.float32), rank, ranks, "load_balanced", replayed=True)
    held = layouts.of_lengths([*range(1, 20 * (ranks - 1), 20), 77])
    _same(case(held.length, batch=1, mask=masks.prefix_lm(held.length, 20)), rank, ranks, held)
    if ranks % 2 == 0:
        _same(case(ranks * 40, with_sinks=True), rank, ranks, ulysses_degree=2)
        _same(pack((0, 50, ranks * 31), dtype=torch.bfloat16), rank, ranks, ulysses_degree=2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_the_bits_of_one_rank_over_gloo(ranks: int) -> None:
    run_ranks(ranks, _over_gloo, timeout=120)


@pytest.mark.parametrize("number", range(4))
def test_cases_drawn_at_random_have_the_bits_of_one_rank(number: int) -> None:
    assert compare_drawn(59, number, ranks=(2, 3, 4)) == ""


def test_recomputed_attention_has_the_same_bits() -> None:
    whole = case(100, batch=1, dtype=torch.float32)
    for reentrant in (False, True):
        way: Any = lambda f, *x, how=reentrant: checkpoint(f, *x, use_reentrant=how)  # noqa: E731
        assert differing(results(whole, way=way, numerics="invariant"), one_rank(whole)) == []


def test_one_rank_is_right_and_is_another_order_than_the_default() -> None:
    whole = case(300, batch=1, dtype=torch.float32)
    assert_exact(shares(whole, one_rank(whole)))
    assert differing(one_rank(whole), results(whole)) != []


def _q(heads: int = 2, head_dim: int = 8) -> torch.Tensor:
    return torch.randn(1, 40, heads, head_dim)


def test_what_keeps_no_order_is_refused_with_what_works() -> None:
    def attend(q: torch.Tensor, v: torch.Tensor, config: dict[str, Any], **asked: Any) -> object:
        options = DistAttentionConfig(numerics="invariant", **config)
        return dfa_megatron.dist_flash_attn_func(q, q, v, **{"causal": True} | asked, config=options)

    q = _q()
    with pytest.raises(UnsupportedError, match=r"kernel='reference'.*company.*kernel='cpu'"):
        attend(q, q, {"kernel": "reference"})
    with pytest.raises(UnsupportedError, match="head_dim"):
        attend(q, _q(head_dim=4), {})
    for schedule in ("ring", "greedy"):
        with pytest.raises(UnsupportedError, match=r"numerics='invariant' with schedule.*balanced"):
            attend(q, q, {"schedule": schedule})
    plan = dfa_megatron.make_plan(masks.causal(40), 1)
    with pytest.raises(UnsupportedError, match=r"numerics='invariant' with a plan.*mask="):
        attend(q, q, {}, plan=plan, causal=None)
    with pytest.raises(UnsupportedError, match=r"no such value"):
        DistAttentionConfig(numerics="same")
    with pytest.raises(UnsupportedError, match=r"layer with states.*numerics='fastest'"):
        dist_conv(lambda x, _: x, q[:, :, 0], 3, config=DistAttentionConfig(numerics="invariant"))


def _copied_keys(rank: int, ranks: int) -> str:
    whole = case(ranks * 20, heads=4, kv_heads=1)
    with pytest.raises(UnsupportedError) as caught:
        results(whole, rank, ranks, numerics="invariant", ulysses_degree=2)
    return str(caught.value)


def test_an_exchange_that_cuts_a_group_of_heads_is_refused() -> None:
    for said in run_ranks(2, _copied_keys):
        assert "query heads of a kv head would be cut" in said


def test_a_kernel_writes_into_memory_of_its_own_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that leave are wider: a kernel of 16 bits must not get their memory."""
    wide, before = list[bool](), Tensors._destinations

    def noted(tensors: Tensors, call: Call) -> tuple[torch.Tensor | None, ...]:
        places = [each.destination() for region in call.writes for each in tensors.write[region.buffer]]
        wide.extend(place is not None and place[0].dtype != torch.bfloat16 for place in places)
        found = before(tensors, call)
        assert all(x is None or x.dtype == torch.bfloat16 for x in found)
        return found

    monkeypatch.setattr(CpuKernel, "writes_into", True)
    monkeypatch.setattr(Tensors, "_destinations", noted)
    whole = case(300, dtype=torch.bfloat16, batch=1)
    assert differing(one_rank(whole), invariant(whole, 4, contiguous(300, 4))) == []
    assert any(wide), "none of the memory was wider: this compares nothing"


# On a GPU that plays all ranks, and on two: by every kernel that serves.

SHAPES = {"flash4": ((8, 2, 128), (4, 4, 64)), "triton": ((4, 2, 64),)}
CASES = {"flash4": 40, "triton": 6}


def drawn_on_gpu(dice: random.Random, kernel: str, number: int) -> Case:
    """Up to 9,000 tokens: a document, a window or a pack. Few are short enough for dense attention."""
    heads, kv_heads, head_dim = SHAPES[kernel][number % len(SHAPES[kernel])]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    tokens = dice.choice([700, 2049, 3000, 4096, 6000, 9000])
    if dice.random() < 0.4:
        ends = [*accumulate(dice.choice([1, 40, 700, 2048, 2300]) for _ in range(dice.randint(2, 6)))]
        return pack((0, *ends), seed=number, **shape)
    window = dice.choice([(-1, -1), (-1, -1), (1500, 0), (100, 0)])
    return case(tokens, batch=dice.choice([1, 2]), causal=dice.random() < 0.8, window_size=window, seed=number, **shape)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # flash4 compiles for minutes
@pytest.mark.parametrize("kernel", CASES)
def test_every_rank_has_the_bits_of_one_rank(kernel: str) -> None:
    skip_unless_it_serves_this_gpu(kernel)
    dice, wrong = random.Random(kernel), list[str]()
    for number in range(CASES[kernel]):
        whole = drawn_on_gpu(dice, kernel, number)
        one = one_rank(whole, kernel=kernel)
        if whole.length <= 3000:
            assert_exact(shares(whole, one, drawn=True))
        for ranks in dice.sample([2, 3, 4, 5], 2):
            layout = drawn_layout(dice, ranks, whole.length)
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
    """Over NCCL, and over copy engines where each rank has a GPU; the third run of a case is a replay."""
    skip_unless_it_serves_this_gpu(kernel)
    dice, wrong = random.Random(f"two {kernel}"), list[str]()
    for number in range(CASES[kernel] // 2):
        whole = drawn_on_gpu(dice, kernel, number)
        layout = drawn_layout(dice, ranks, whole.length)
        one, rows = one_rank(whole, kernel=kernel), whole.rows(rank, ranks, layout)
        mine = Results(*(x[:, :, rows] if x is one.lse else x[:, rows] for x in one[:5]), None)
        for transport in transports(ranks):
            asked = {"layout": layout, "kernel": kernel, "transport": transport, "numerics": "invariant"}
            for _ in range(3 if number % 3 == 0 else 1):
                if names := differing(mine, results(whole, rank, ranks, **asked)):
                    wrong.append(f"case {number}, {whole.length} tokens, {layout}, {transport}: {names}")
    assert wrong == []
