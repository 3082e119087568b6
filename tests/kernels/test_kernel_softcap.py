"""Capped scores: every kernel that can, against dense float64 attention with its gradient, and who takes them."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.adapters import flash4
from dfa_megatron.kernels.api import BlockCall, Need, Saved
from dfa_megatron.plan.language.geometry import CAUSAL, Band
from tests.support.close import assert_close
from tests.support.kernel_cases import TARGETS, Case, check, every_dtype, run, usable
from tests.support.support_rows import in_bfloat16
from tests.support.support_rows import kernel as of_kernel

CAPPING = [(name, device) for name, device in TARGETS if kernels.get(name).caps_scores]
CASES = {
    "causal": Case(129, 129, CAUSAL, heads=4, kv_heads=2, head_dim=64, batch=1),
    "full": Case(40, 72),
    "window": Case(80, 48, Band(20, 4), heads=4, kv_heads=1),
    "wide heads": Case(130, 130, CAUSAL, heads=2, kv_heads=1, head_dim=256, batch=1),
}
CAPS = (0.7, 2.0, 30.0)
"""Saturated nearly everywhere, bent, and hardly felt: scores are up to about 5."""


@pytest.mark.support("kernels", in_bfloat16("softcap"), of_kernel)
@pytest.mark.parametrize(("name", "device"), CAPPING, ids=[f"{name} on {device}" for name, device in CAPPING])
@every_dtype
@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("softcap", CAPS)
def test_a_block_of_capped_scores_is_exact(
    name: str, device: str, dtype: torch.dtype, rows: str, softcap: float
) -> None:
    case = CASES[rows]
    kernel = usable(name, device, dtype, case)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rows}{dtype}{softcap}".encode()))

    def draw(length: int, heads: int) -> torch.Tensor:
        values = torch.randn(case.batch, length, heads, case.head_dim, generator=generator, dtype=torch.float64)
        return values.to(dtype).to(device)

    q, dout = draw(case.q_len, case.heads), draw(case.q_len, case.heads)
    k, v = draw(case.kv_len, case.kv_heads), draw(case.kv_len, case.kv_heads)
    scale = 1.2 / math.sqrt(case.head_dim)
    exact = tuple(x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    want, want_lse = dense_attention(*exact, case.band, softmax_scale=scale, softcap=softcap)
    gradients = torch.autograd.grad(want, exact, dout.double())
    out, lse, *got = run(kernel, BlockCall.of(q, k, v, case.band, scale, softcap=softcap), dout)
    if name != "flash4":
        check(name, (out, lse, *got), (want.detach(), want_lse.detach(), *gradients), dtype)
        return
    # Its tanh is the hardware's approximation, which is off by up to 5e-4 of the capped score.
    assert_close(lse, want_lse, tolerance=2e-3, name="lse")
    for label, g, w in zip(("out", "dq", "dk", "dv"), (out, *got), (want, *gradients), strict=True):
        assert_close(g, w, tolerance=2e-2, name=label)


def test_flash4_hands_the_cap_to_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, float]] = []

    def record(**arguments: Any) -> tuple[torch.Tensor, ...]:
        given.append((arguments["softcap"], arguments["softmax_scale"]))
        return arguments["q"], torch.zeros(1, 2, 8), arguments["v"]

    monkeypatch.setattr(flash4, "_functions", lambda: (record, record))
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    saved = Saved(torch.zeros(1, 2, 8), minus_delta=torch.zeros(1, 2, 8))
    kernel = kernels.get("flash4")
    for softcap in (0.0, 30.0):
        call = BlockCall.of(q, q, q, CAUSAL, 0.5, softcap=softcap)
        kernel.forward(call)
        kernel.backward(call, q, saved)
        assert given[-2:] == [(softcap, 0.5)] * 2


NEED = Need("cpu", torch.float32, 2, 2, 32, 32, frozenset({"causal"}), softcap=30.0)


@pytest.mark.support("kernels", "softcap", "`cpu`", refuses=True)
@pytest.mark.support("kernels", "softcap", "`aten`", refuses=True)
@pytest.mark.support("kernels", "softcap", "`cudnn`", refuses=True)
@pytest.mark.support("kernels", "softcap", "`flash3`", refuses=True)
@pytest.mark.support("kernels", "softcap", "`flash2`", refuses=True)
def test_kernels_that_cap_nothing_refuse_and_name_those_that_can() -> None:
    with pytest.raises(UnsupportedError, match=r"softcap 30.*it caps no scores.*kernel=.*'reference'"):
        kernels.select("cpu", NEED)
    for name in ("cudnn", "aten", "flash2", "flash3", "cpu"):
        assert kernels.refusal(kernels.get(name), NEED) == "it caps no scores"
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(UnsupportedError, match="positive and finite"):
            kernels.select("auto", replace(NEED, softcap=wrong))


def test_auto_takes_the_first_kernel_that_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "cudnn", "flash4"):
        monkeypatch.setattr(type(kernels.get(name)), "refusal", lambda self, need: None)
        assert kernels.select("auto", NEED).name == ("flash4" if name == "flash4" else "triton")
