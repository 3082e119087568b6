"""Merging partials: exact, associative, in place on views, and safe where a side has seen nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.kernels import merge as merging
from dfa_megatron.kernels.merge import add, identity_, minus_delta
from dfa_megatron.kernels.segments import Rows
from dfa_megatron.kernels.triton import support
from dfa_megatron.kernels.triton.support import interpreted, triton_refusal
from dfa_megatron.plan.language.geometry import Span
from tests.support.close import assert_close

Partial = tuple[torch.Tensor, torch.Tensor]


def partials(parts: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[list[Partial], Partial]:
    """The partials of one query chunk over blocks of its keys, and the whole."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, 3, 16, generator=generator, dtype=torch.float64) for n in (10, 8 * parts, 8 * parts))
    blocks = [dense_attention(q, k[:, s : s + 8], v[:, s : s + 8]) for s in range(0, 8 * parts, 8)]
    return [(out.to(dtype), lse) for out, lse in blocks], dense_attention(q, k, v)


def merge(blocks: list[Partial], dtype: torch.dtype = torch.float64) -> Partial:
    out, lse = torch.empty(2, 10, 3, 16, dtype=dtype), torch.empty(2, 3, 10, dtype=dtype)
    whole = out, lse
    identity_(*whole)
    for block in blocks:
        merging.merge([whole, block], whole)
    return whole


def test_many_merges_do_not_drift() -> None:
    """256 partials of the same scores: the mean of their outs, and lse + log 256."""
    generator = torch.Generator().manual_seed(3)
    outs = torch.randn(256, 2, 10, 3, 16, generator=generator)
    lse = torch.full((2, 3, 10), 5.0)
    merged_out, merged_lse = merge([(out, lse) for out in outs], torch.float32)
    assert_close(merged_out, outs.double().mean(0), tolerance=2e-6)
    assert_close(merged_lse, lse.double() + math.log(256), tolerance=1e-6)


def test_a_side_that_saw_nothing_weighs_exactly_zero() -> None:
    (block,), _ = partials(1)
    nothing = (torch.zeros_like(block[0]), torch.full_like(block[1], -math.inf))
    for order in ([block, nothing], [nothing, block], [nothing, block, nothing]):
        out, lse = merge(order)
        assert torch.equal(out, block[0])
        assert torch.equal(lse, block[1])
    out, lse = merge([nothing, nothing])
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("gap", [0.0, 30.0, 200.0, 1e4, -1e4])
def test_lse_far_apart_neither_overflow_nor_lose_the_larger(gap: float) -> None:
    blocks, _ = partials(2)
    (out_a, lse_a), (out_b, lse_b) = blocks
    out, lse = merge([(out_a, lse_a + gap), (out_b, lse_b)])
    weight = torch.sigmoid(lse_a + gap - lse_b).transpose(1, 2).unsqueeze(-1)
    assert_close(out, weight * out_a + (1 - weight) * out_b, tolerance=1e-14)
    assert_close(lse, torch.logaddexp(lse_a + gap, lse_b), tolerance=1e-14)


def test_a_partial_is_not_changed_and_nan_is_not_hidden() -> None:
    blocks, _ = partials(2)
    kept = [tuple(x.clone() for x in block) for block in blocks]
    merge(blocks)
    assert all(
        torch.equal(a, b) for block, copy in zip(blocks, kept, strict=True) for a, b in zip(block, copy, strict=True)
    )
    blocks[1][1][0, 0, 0] = math.nan
    out, lse = merge(blocks)
    assert lse[0, 0, 0].isnan()
    assert out[0, 0, 0].isnan().all()
    assert not out[1].isnan().any()


def parts_with_every_case(dtype: torch.dtype, device: str) -> tuple[Partial, Partial]:
    """Two partials, rows of larger ones, where either side, both or neither has seen something, and NaN."""
    generator = torch.Generator().manual_seed(11)
    shapes = (2, 45, 3, 40), (2, 50, 3, 40), (2, 3, 45), (2, 3, 37)
    acc_out, out, acc_lse, lse = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    acc_out, out, acc_lse, lse = acc_out[:, 3:40], out.to(dtype)[:, 13:], acc_lse[:, :, 3:40], lse * 30
    acc_lse[0, 0, :7] = lse[0, 0, 4:11] = -math.inf
    acc_out[0, :7, 0] = 0
    acc_lse[1, 2, 5] = lse[1, 1, 6] = math.nan
    acc_lse[1, 0, 9] = lse[1, 0, 9]
    return (acc_out, acc_lse), (out, lse)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("triton", [True, False])
def test_tensors_are_filled_once_a_flag_is_raised_and_not_before(
    triton: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton and device == "cpu" and not interpreted():
        pytest.skip("Triton takes CPU tensors in its interpreter alone")
    monkeypatch.setattr(support, "triton_refusal", lambda: None if triton else "no Triton in this test")
    numbers = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
    tensors = [torch.ones(3, 1000 * at + 7, dtype=dtype, device=device) for at, dtype in enumerate(numbers)]
    tensors.append(torch.ones(0, device=device))
    for raised in (False, True):
        merging.fill_if(torch.tensor(int(raised), dtype=torch.int32, device=device), tensors)
        for x in tensors:
            filled = x.isnan() if x.dtype.is_floating_point else x.to(torch.int8) == -1
            assert bool(filled.all() if raised else (x == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_fused_merge_is_the_merge(device: str, dtype: torch.dtype, into_dtype: torch.dtype | None) -> None:
    """On CUDA, or in the interpreter; elsewhere this says that merging into another dtype is merging and rounding."""
    old, new = parts_with_every_case(dtype, device)
    want = old[0].clone(), old[1].clone()
    merging._merge_by_operations([want, new], want)
    if device == "cuda" or interpreted():
        assert merging._fusable(*old, *new) == (triton_refusal() is None)
        if triton_refusal() is None:
            from dfa_megatron.kernels.triton import merge as triton_merge

            assert all(triton_merge.takes(*part) for part in (old, new))
    into = old
    if into_dtype is not None:
        into = torch.empty(2, 41, 3, 40, dtype=into_dtype, device=device)[:, 4:], torch.empty(2, 3, 37, device=device)
    kept = old[0].clone(), old[1].clone()
    merging.merge([old, new], into)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(into[0].dtype, 1e-6)
    assert torch.allclose(into[0].float(), want[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.allclose(into[1], want[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert want[0].isnan().any()
    assert (want[1] == -math.inf).any()
    if into is not old:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(old, kept, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtypes", list(itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=3)))
def test_gradients_add_in_float32_and_round_once(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    old, new = (torch.randn(2, 50, 3, 24, generator=generator).to(dtype).to(device) for dtype in dtypes[:2])
    old = old[:, 4:41]
    new = new[:, :37]
    into = torch.full((2, 45, 3, 24), 7.0, dtype=dtypes[2], device=device)
    add([old, new], into[:, 3:40])
    want = (old.float() + new.float()).to(dtypes[2])
    if interpreted() and dtypes[2] == torch.bfloat16:  # Triton's interpreter cuts off where a GPU rounds
        assert torch.allclose(into[:, 3:40], want, rtol=2**-7)
    else:
        assert torch.equal(into[:, 3:40], want)
    assert (into[:, :3] == 7).all()
    assert (into[:, 40:] == 7).all()
    if dtypes[0] == torch.float32:
        want = old + new.float()
        add([old, new], old)
        assert torch.equal(old, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_minus_delta_is_the_negative_row_sum_of_products(device: str, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(4)
    dout, out = (torch.randn(2, 41, 3, 40, generator=generator).to(dtype).to(device)[:, 2:39] for _ in range(2))
    got = minus_delta(dout, out)
    assert got.shape == (2, 3, 37)
    assert got.dtype == torch.float32
    assert_close(got, -(dout.double() * out.double()).sum(-1).transpose(1, 2), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_partials_merge_at_once(device: str, count: int, dtype: torch.dtype) -> None:
    blocks, (want_out, want_lse) = partials(count, dtype, seed=count)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [(out.to(device), lse.to(lse_dtype).to(device)) for out, lse in blocks]
    into = torch.empty_like(parts[0][0]), torch.empty_like(parts[0][1])
    merging.merge(parts, into)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    assert_close(into[0], want_out, tolerance=tolerance)
    assert_close(into[1], want_lse, tolerance=max(tolerance, 1e-14) if dtype == torch.float64 else 1e-6)
    parts[1][1].fill_(-math.inf)
    parts[1][0].zero_()
    rest = merge([(out.cpu().double(), lse.cpu().double()) for out, lse in parts])
    for at in range(count):
        mine = [(out.clone(), lse.clone()) for out, lse in parts]
        merging.merge(mine, mine[at])
        assert_close(mine[at][0], rest[0], tolerance=tolerance)
        assert_close(mine[at][1], rest[1], tolerance=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_gradients_add_at_once_and_round_once(device: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(2, 9, 3, 40, generator=generator).bfloat16().to(device) for _ in range(count)]
    total = sum(part.double() for part in parts)
    into = torch.empty(2, 9, 3, 40, device=device)
    add(parts, into)
    assert_close(into, total, tolerance=1e-7)
    for at in range(count):
        mine = [part.clone() for part in parts]
        add(mine, mine[at])
        assert_close(mine[at], total, tolerance=4e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_of_rows_are_summed_once_rounded_whatever_their_order(device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(1, 10, (25,), generator=generator)  # no copy of row 0
    x = torch.randn(1, 25, 3, 40, generator=generator).bfloat16().to(device)
    into = torch.full((1, 11, 3, 40), math.nan, device=device)
    want = torch.zeros(1, 11, 3, 40, dtype=torch.float64).index_add(1, index, x.double().cpu())
    merging.sum_rows(x, Rows(tuple(Span(row, row + 1) for row in index.tolist()), 11), into)
    assert_close(into, want, tolerance=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_partials_in_any_memory_order_merge(device: str) -> None:
    blocks, (want_out, want_lse) = partials(3, torch.float32)
    order = [(out.transpose(0, 1).contiguous().transpose(0, 1).to(device), lse.mT.contiguous().mT.to(device))
             for out, lse in blocks]  # fmt: skip
    into = torch.empty(10, 2, 3, 16, device=device).transpose(0, 1), torch.empty(2, 10, 3, device=device).mT
    merging.merge(order, into)
    assert_close(into[0], want_out, tolerance=1e-6)
    assert_close(into[1], want_lse, tolerance=1e-6)


@pytest.mark.gpu
def test_no_row_is_merged_twice_however_the_warps_of_a_program_are_scheduled() -> None:
    """Several warps read a row's lse, which is written in place: beside other work, none may read the new."""
    generator = torch.Generator("cuda").manual_seed(5)
    out, old_out = (torch.randn(1, 4096, 16, 128, generator=generator, device="cuda") for _ in range(2))
    lse, old_lse = (torch.randn(1, 16, 4096, generator=generator, device="cuda") for _ in range(2))
    want = old_out.clone(), old_lse.clone()
    merging._merge_by_operations([want, (out, lse)], want)
    busy, load = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    worst = torch.zeros((), device="cuda")
    for _ in range(200):
        with torch.cuda.stream(load):
            busy = torch.sin(busy)
        got = old_out.clone(), old_lse.clone()
        merging.merge([got, (out, lse)], got)
        worst = torch.maximum(worst, torch.maximum((got[0] - want[0]).abs().max(), (got[1] - want[1]).abs().max()))
    assert worst < 1e-5


def test_a_fused_merge_that_does_not_work_here_is_said_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> str:
        raise OSError("no compiler")

    monkeypatch.setattr(support, "triton_refusal", lambda: None)
    monkeypatch.setattr(merging, "_difference", fail)
    merging._works.cache_clear()
    try:
        assert not merging._works(torch.device("cpu"))
        assert not merging._works(torch.device("cpu"))
    finally:
        merging._works.cache_clear()
    (record,) = caplog.records
    assert (
        "merged by PyTorch's operations on cpu, which is slower: Triton failed: OSError: no compiler" in record.message
    )
