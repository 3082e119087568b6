"""One suite for every kernel: out, lse and the three gradients of a block against dense attention in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.kernels import BlockCall, Saved, accumulator_dtype
from dfa_megatron.kernels.adapters import flash4, flash4_launches
from dfa_megatron.kernels.merge import identity_, merge
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from tests.support.close import assert_close
from tests.support.kernel_cases import (
    LAYOUTS,
    TOLERANCE,
    Case,
    as_layout,
    every_capping,
    every_dtype,
    every_target,
    problem,
    run,
    saved_for,
    usable,
)  # fmt: skip
from tests.support.packs import skip_unless_it_serves_this_gpu
from tests.support.support_rows import in_bfloat16, of_block
from tests.support.support_rows import kernel as of_kernel

SHAPES = [
    *(Case(q, kv) for q, kv in ((64, 64), (40, 72), (130, 33), (1, 5), (7, 1))),
    Case(600, 520, heads=1, kv_heads=1, batch=1),
    *(Case(n, n, CAUSAL) for n in (64, 129, 1)),
    Case(300, 300, CAUSAL, heads=4, kv_heads=2, head_dim=64, batch=1),
]
BANDS = [
    *(Case(48, 48, Band(*bounds)) for bounds in ((9, 0), (0, 0), (5, 3), (-1, 7), (7, -1), (0, -1))),
    *(Case(32, 80, Band(*bounds)) for bounds in ((-1, 0), (20, 4), (-1, 4), (40, -1))),
    *(Case(80, 32, Band(*bounds)) for bounds in ((-1, 0), (12, 6), (-1, 40), (20, -1))),
    *(Case(80, kv, Band(*bounds)) for kv, bounds in ((8, (12, 70)), (8, (50, 60)), (1, (50, 60)))),
    Case(20, 50, Band(100, 100)),
    Case(700, 900, Band(200, 0), heads=2, kv_heads=1, batch=1),
    Case(48, 64, Band(11, 3), heads=6, kv_heads=2),
]
HEADS = [
    *(Case(40, 56, heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((8, 2), (6, 1))),
    Case(40, 40, CAUSAL, heads=6, kv_heads=3),
    Case(24, 24, CAUSAL, heads=33, kv_heads=33, batch=1),
    Case(24, 24, heads=33, kv_heads=11, batch=1),
    Case(24, 24, heads=1, kv_heads=1),
    Case(1, 24, heads=6, kv_heads=2, batch=2),
    Case(24, 1, heads=6, kv_heads=2),
    Case(24, 24, CAUSAL, heads=6, kv_heads=1, batch=1),
]
HEAD_DIMS = [
    *(Case(40, 40, CAUSAL, head_dim=d) for d in (8, 40, 64, 80, 96, 128, 192, 256)),
    Case(40, 40, head_dim=17),
    Case(40, 56, head_dim=33, heads=4, kv_heads=2),
    Case(40, 40, CAUSAL, head_dim=100),
    Case(40, 40, CAUSAL, head_dim=192, head_dim_v=128),
    Case(40, 56, head_dim=24, head_dim_v=40),
]
LONG = [
    Case(260, 390, CAUSAL, heads=4, kv_heads=2, head_dim=128, batch=1),
    Case(390, 261, Band(150, 30), heads=2, kv_heads=1, head_dim=128, batch=1),
    Case(277, 277, CAUSAL, heads=2, kv_heads=2, head_dim=256, batch=1),
    Case(333, 259, heads=2, kv_heads=2, head_dim=64, batch=1),
]
"""Several blocks of every kernel at the head dimensions of models."""

CASES = SHAPES + BANDS + HEADS + HEAD_DIMS + LONG
FEW = SHAPES + HEADS[:1] + LONG + BANDS[2::5]
"""For float16, whose kernels are bfloat16's with another instruction: compiling all of them takes minutes."""


@pytest.mark.support("kernels", of_block, of_kernel)
@every_target
@pytest.mark.parametrize(
    ("dtype", "case"),
    [(dtype, case) for dtype in TOLERANCE for case in (FEW if dtype == torch.float16 else CASES)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_block_is_what_dense_float64_attention_says(name: str, device: str, dtype: torch.dtype, case: Case) -> None:
    kernel = usable(name, device, dtype, case)
    p = problem(case, dtype, device)
    p.check(name, run(kernel, p.call, p.dout))


@pytest.mark.support("kernels", "strided and misaligned inputs", of_kernel)
@every_target
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [Case(40, 56), Case(40, 40, CAUSAL, heads=6, kv_heads=2), Case(56, 40, Band(9, 4)), Case(40, 40, CAUSAL, batch=1)],
    ids=str,
)
def test_strided_views_give_the_same_numbers(name: str, device: str, layout: str, case: Case) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kernel = usable(name, device, dtype, case)
    p = problem(case, dtype, device)
    viewed = dataclasses.replace(p.call, **{field: as_layout(getattr(p.call, field), layout) for field in "qkv"})
    p.check(name, run(kernel, viewed, as_layout(p.dout, layout)))
    out, lse = kernel.forward(p.call)
    saved = saved_for(kernel, p.dout, as_layout(out, layout), lse.transpose(1, 2).contiguous().transpose(1, 2))
    p.check(name, (out, lse, *kernel.backward(p.call, p.dout, saved)))


@every_target
@every_dtype
@pytest.mark.parametrize(
    "case", [Case(70, 30, CAUSAL), Case(70, 30, Band(2, 3)), Case(600, 20, CAUSAL, heads=4, kv_heads=2)], ids=str
)
def test_rows_that_see_nothing_give_zero_and_minus_infinity(
    name: str, device: str, dtype: torch.dtype, case: Case
) -> None:
    kernel = usable(name, device, dtype, case)
    p = problem(case, dtype, device)
    out, lse, dq, dk, dv = run(kernel, p.call, p.dout)
    blind = p.lse[0, 0] == -math.inf
    assert blind.sum() >= 30
    assert (out[:, blind] == 0).all()
    assert (lse[:, :, blind] == -math.inf).all()
    assert (dq[:, blind] == 0).all()
    p.check(name, (out, lse, dq, dk, dv))


WHOLE = slice(0, None)
LONG_ROWS = {
    "two full blocks": (
        Case(48, 104, heads=4, kv_heads=2),
        [(WHOLE, slice(0, 40), FULL), (WHOLE, slice(40, 104), FULL)],
    ),
    "a full and a causal block": (Case(48, 96, CAUSAL), [(WHOLE, slice(0, 48), FULL), (WHOLE, slice(48, 96), CAUSAL)]),
    "a window over three blocks": (
        Case(40, 120, Band(55, 0), heads=2, kv_heads=1),
        [
            (slice(0, 15), slice(25, 40), Band(0, -1)),
            (WHOLE, slice(40, 80), Band(15, -1)),
            (WHOLE, slice(80, 120), CAUSAL),
        ],
    ),
    "a block that some rows do not see": (
        Case(64, 96, CAUSAL),
        [(WHOLE, slice(0, 40), Band(-1, 56)), (WHOLE, slice(40, 96), CAUSAL)],
    ),
}


@every_target
@every_dtype
@pytest.mark.parametrize("rows", list(LONG_ROWS))
def test_blocks_of_a_longer_row_sum_to_its_gradient(name: str, device: str, dtype: torch.dtype, rows: str) -> None:
    """The contract that distribution rests on: forward per block and merge, backward with the global lse and out."""
    case, blocks = LONG_ROWS[rows]
    lengths = [(len(range(case.q_len)[r]), c.stop - c.start) for r, c, _ in blocks]
    calls = [
        dataclasses.replace(case, q_len=q, kv_len=kv, band=b[2]) for (q, kv), b in zip(lengths, blocks, strict=True)
    ]
    kernel = usable(name, device, dtype, *calls)
    p = problem(case, dtype, device)
    wide, parts = accumulator_dtype(dtype), [(r, c, *p.part(r, c, band)) for r, c, band in blocks]
    acc_out = torch.empty(p.dout.shape, dtype=wide, device=device)
    acc_lse = torch.empty(p.lse.shape, dtype=wide, device=device)
    identity_(acc_out, acc_lse)
    for r, _, call, _ in parts:
        of_rows = acc_out[:, r], acc_lse[:, :, r]
        merge([of_rows, kernel.forward(call)], of_rows)
    out = acc_out.to(dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (p.call.q, p.call.k, p.call.v))
    for r, c, call, dout in parts:
        gradients = kernel.backward(call, dout, saved_for(kernel, dout, out[:, r], acc_lse[:, :, r]))
        for acc, where, gradient in zip((dq, dk, dv), (r, c, c), gradients, strict=True):
            acc[:, where] += gradient
    p.check(name, (out, acc_lse, dq.to(dtype), dk.to(dtype), dv.to(dtype)))


@every_target
@every_dtype
@pytest.mark.parametrize("case", [Case(64, 64), Case(64, 64, CAUSAL), Case(64, 64, Band(9, 9))], ids=str)
def test_large_logits_do_not_overflow(name: str, device: str, dtype: torch.dtype, case: Case) -> None:
    kernel = usable(name, device, dtype, case)
    p = problem(case, dtype, device, gain=400.0)
    assert p.lse.abs().max() > 500
    out, lse, *gradients = run(kernel, p.call, p.dout)
    assert_close(out, p.want[0], tolerance={torch.float64: 1e-11, torch.float32: 1e-3}.get(dtype, 8e-3), name="out")
    assert_close(lse, p.lse, tolerance=1e-12 if dtype == torch.float64 else 1e-6, name="lse")
    for label, got, want in zip(("dq", "dk", "dv"), gradients, p.want[2:], strict=True):
        assert got.isfinite().all(), label
        if dtype == torch.float64:
            assert_close(got, want, tolerance=1e-9, name=label)


@pytest.mark.support("kernels", "deterministic backward", of_kernel)
@every_target
@pytest.mark.parametrize("case", [Case(384, 384, CAUSAL, heads=4, kv_heads=2), Case(384, 640, Band(90, 5))], ids=str)
def test_deterministic_gradients_have_equal_bits(name: str, device: str, case: Case) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kernel = usable(name, device, dtype, case, deterministic=True)
    p = problem(case, dtype, device)
    call, mode = dataclasses.replace(p.call, deterministic=True), torch.get_deterministic_debug_mode()
    first = run(kernel, call, p.dout)
    assert torch.get_deterministic_debug_mode() == mode
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(kernel, call, p.dout), strict=True))


@every_target
def test_inputs_are_left_as_they_were(name: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = Case(40, 40, CAUSAL)
    kernel = usable(name, device, dtype, case)
    p = problem(case, dtype, device)
    saved = saved_for(kernel, p.dout, *kernel.forward(p.call))
    given = [p.call.q, p.call.k, p.call.v, p.dout, saved.lse, saved.minus_delta, saved.out]
    given = [x for x in given if x is not None]
    before = [x.clone() for x in given]
    run(kernel, p.call, p.dout)
    kernel.backward(p.call, p.dout, saved)
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


BENT = {
    "causal": Case(129, 129, CAUSAL, heads=4, kv_heads=2, head_dim=64, batch=1),
    "full": Case(40, 72),
    "window": Case(80, 48, Band(20, 4), heads=4, kv_heads=1),
    "wide heads": Case(130, 130, CAUSAL, heads=2, kv_heads=1, head_dim=256, batch=1),
}


@pytest.mark.support("kernels", in_bfloat16("softcap"), of_kernel)
@every_capping
@every_dtype
@pytest.mark.parametrize("rows", BENT)
@pytest.mark.parametrize("softcap", [0.7, 2.0, 30.0])  # scores are up to about 5: nearly all at the cap, bent, hardly
def test_a_block_of_capped_scores_is_exact(
    name: str, device: str, dtype: torch.dtype, rows: str, softcap: float
) -> None:
    kernel = usable(name, device, dtype, BENT[rows])
    p = problem(BENT[rows], dtype, device, scale=1.2, softcap=softcap)
    # flash4's tanh is the hardware's approximation, which is off by up to 5e-4 of the capped score.
    p.check(name, run(kernel, p.call, p.dout), tanh=2e-2 if name == "flash4" else 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (8, 8), (12, 4)], ids="heads {0[0]} on {0[1]}".format)
def test_flash4_is_exact_some_heads_at_a_time_and_where_memory_comes_late(
    heads: tuple[int, int], band: Band, deterministic: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_it_serves_this_gpu("flash4")
    monkeypatch.setattr(*((flash4_launches, "_LARGE", 0) if late else (flash4, "_ACCUMULATORS", 1)))
    count, kv_count = heads
    generator = torch.Generator("cuda").manual_seed(count * 10 + kv_count)

    def rows(heads: int, *, turned: bool = False) -> torch.Tensor:
        shape = (2, heads, 300, 128) if turned else (2, 300, heads, 128)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2) if turned else x

    q, k, v, dout = rows(count), rows(kv_count), rows(kv_count, turned=True), rows(count, turned=True)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*exact, band, softmax_scale=0.09)
    want = torch.autograd.grad(out, exact, dout.double())
    minus_delta = -(dout.double() * out.detach()).sum(-1).transpose(1, 2).float().contiguous()
    assert (flash4._passes(q, k) > 1) is not late
    call = BlockCall.of(q, k, v, band, 0.09, deterministic=deterministic)
    for known in ({"minus_delta": minus_delta}, {"out": out.detach().bfloat16()}):
        got = kernels.get("flash4").backward(call, dout, Saved(lse.detach().float(), **known))
        for name, g, w in zip(("dq", "dk", "dv"), got, want, strict=True):
            assert_close(g, w, tolerance=1e-2, name=name)
