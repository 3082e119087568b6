"""flash4's backward as long calls have it, against dense attention in float64; on GPUs.

It takes some heads at a time, or its memory late.
"""

from __future__ import annotations

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.kernels.adapters import flash4, flash4_launches
from dfa_megatron.kernels.api import BlockCall, Saved
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from tests.support.close import assert_close
from tests.support.packs import skip_unless_it_serves_this_gpu


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
