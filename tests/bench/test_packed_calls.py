"""What peers get under flash-attn's names for several documents is what dense attention says of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.attention.baselines import flash_attn_shim
from dfa_megatron.testing.dense import assert_close, dense_attention


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_calls_are_exact(device: str, causal: bool) -> None:
    offsets, dtype = (0, 1, 9, 40, 64), torch.bfloat16
    q, k, v, dout = (torch.randn(64, heads, 32, device=device).to(dtype) for heads in (4, 2, 2, 4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    parts = [
        dense_attention(*(x[None, lo:hi] for x in exact), causal=causal, softmax_scale=0.2)
        for lo, hi in pairwise(offsets)
    ]
    want, want_lse = torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
    gradients = torch.autograd.grad(want, exact, dout.double())
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    out, lse, _, _ = flash_attn_shim._flash_attn_varlen_forward(q, k, v, cu, cu, 31, 31, 0.0, 0.2, causal)
    got = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn_shim._flash_attn_varlen_backward(dout, q, k, v, out, lse, *got, cu, cu, 31, 31, 0.0, 0.2, causal)
    assert_close(out, want.detach(), tolerance=1e-2, name="out")
    assert_close(lse, want_lse.detach(), tolerance=1e-4, name="lse")
    for name, g, w in zip(("dq", "dk", "dv"), got, gradients, strict=True):
        assert_close(g, w, tolerance=2e-2, name=name)
