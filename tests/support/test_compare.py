"""The reference is attention as PyTorch has it, and the comparison lets no wrong value through.

Uninitialised memory is NaN inside of `nan_memory`, and what it was outside.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dfa_megatron.doctor.dense import band_of, dense_attention
from tests.support import nan_memory as memory
from tests.support.attend import Results, assert_exact, case, shares
from tests.support.close import assert_close


def inputs(seed: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 7, heads, 8), (2, 7, kv_heads, 8), (2, 7, kv_heads, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_dense_attention_and_its_gradients_are_those_of_pytorch(heads: int, kv_heads: int, causal: bool) -> None:
    leaves = inputs(heads, heads, kv_heads)
    out, lse = dense_attention(*leaves, band_of(causal), softmax_scale=0.3)
    q, k, v = (t.transpose(1, 2) for t in leaves)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True).transpose(1, 2)
    assert_close(out, want, tolerance=1e-14)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), leaves), strict=True):
        assert_close(a, b, tolerance=1e-13)
    scores = 0.3 * q @ k.repeat_interleave(heads // kv_heads, 1).mT
    if causal:
        scores = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf)
    assert_close(lse, scores.logsumexp(-1), tolerance=1e-14)


def test_kv_heads_that_do_not_divide_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_heads \(3\) must divide heads \(4\)"):
        dense_attention(*inputs(0, 4, 3))


def test_the_element_that_is_farthest_off_is_named() -> None:
    want = torch.arange(1.0, 13.0).view(3, 4)
    got = want.clone()
    got[2, 1] += 0.5
    got[0, 0] += 0.1
    with pytest.raises(AssertionError, match=r"dq: relative distance 2\.0\d\de-02.*at \(2, 1\): 10\.5, wanted 10$"):
        assert_close(got, want, tolerance=1e-3, name="dq")
    assert_close(got, want, tolerance=0.03)


def test_nan_and_infinities_elsewhere_never_pass() -> None:
    want = torch.tensor([1.0, -math.inf, 2.0])
    assert_close(want.clone(), want, tolerance=0)
    for got in ([1.0, 0.0, 2.0], [1.0, math.inf, 2.0], [-math.inf] * 3):
        with pytest.raises(AssertionError, match="wanted"):
            assert_close(torch.tensor(got), want, tolerance=1e9)
    spoilt = torch.tensor([1.0, 1.0, math.nan, 1.0])
    for pair in ((spoilt, torch.ones(4)), (torch.ones(4), spoilt), (spoilt, spoilt)):
        with pytest.raises(AssertionError, match=r"at \(2,\) is NaN"):
            assert_close(*pair, tolerance=math.inf)


def test_the_distances_of_a_case_are_shares_of_what_is_tolerated() -> None:
    whole = case(8, with_sinks=True)
    exact = whole.exact
    assert set(shares(whole, exact).values()) == {0.0}
    off = exact._replace(dk=exact.dk * (1 + 8e-14), lse=exact.lse.clone().fill_(math.nan))
    found = shares(whole, off)
    assert found["dk"] == pytest.approx(2.0, rel=0.1)
    assert found["lse"] == math.inf
    with pytest.raises(AssertionError, match="lse inf, dk"):
        assert_exact(found)
    assert shares(whole, off, tolerance=1.0)["dk"] < 1e-12
    moved = exact._replace(out=exact.out.roll(1, 1))
    assert shares(whole, moved)["out"] > 1e10
    part = Results(*(x[:, :, 2:5] if n == 1 else x if n == 5 else x[:, 2:5] for n, x in enumerate(exact)))
    assert set(shares(whole, part, (torch.arange(2, 5),) * 2).values()) == {0.0}


def test_shapes_must_be_equal_and_zeros_are_compared_absolutely() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(1, 3), torch.zeros(3), tolerance=1)
    assert_close(torch.full((2,), 1e-9), torch.zeros(2), tolerance=1e-8)
    with pytest.raises(AssertionError):
        assert_close(torch.full((2,), 1e-3), torch.zeros(2), tolerance=1e-8)
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3), tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_memory_is_nan_inside_and_outside_nothing_is_changed(dtype: torch.dtype) -> None:
    before = [getattr(owner, name) for owner, name in memory.ALLOCATORS]
    x = torch.zeros(3, 4, dtype=dtype)
    with memory.nan_memory():
        made = (
            torch.empty(3, 4, dtype=dtype), torch.empty_like(x), torch.empty_strided((3, 4), (8, 1), dtype=dtype),
            x.new_empty(3, 4), x.new_empty_strided((3, 4), (1, 3)),
        )  # fmt: skip
        assert all(one.float().isnan().all() for one in made)
        assert torch.empty(8, dtype=torch.uint8).view(torch.float32).isnan().all()
        assert torch.empty(4, dtype=torch.int64).eq(-1).all()
        assert torch.empty(4, dtype=torch.bool).all()
        assert torch.empty(2, requires_grad=True).isnan().all()
        assert torch.empty(2, device="meta").is_meta
        assert torch.empty(0).numel() == 0
    with pytest.raises(ZeroDivisionError), memory.nan_memory():
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in memory.ALLOCATORS] == before
