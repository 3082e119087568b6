"""Attention sinks: exact against a dense softmax with one more score a row, in every way to run the operator."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.arguments import arguments
from tests.support.cases import TOLERANCE, Tensors, positions
from tests.support.close import assert_close
from tests.support.nan_memory import nan_memory
from tests.support.workers import run_ranks


def inputs(length: int, heads: int, dtype: torch.dtype, seed: int, head_dim: int = 8) -> tuple[Tensors, torch.Tensor]:
    """(q, k, v, dout) of a whole sequence and sinks, which are from negligible to overwhelming."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int) -> torch.Tensor:
        return torch.randn((2, length, count, head_dim), generator=generator, dtype=torch.float64).to(dtype)

    sinks = 3 * torch.randn(heads, generator=generator, dtype=torch.float64)
    return (random(heads), random(heads // 2), random(heads // 2), random(heads)), sinks


def attend_and_compare(
    rank: int, ranks: int, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> None:
    """A forward and backward of this rank's rows; the sinks' gradient is the dense one once all ranks' are summed."""
    length = ranks * 10
    (q, k, v, dout), sinks = inputs(length, 4, dtype, seed)
    band = band_of(options.get("causal", True), options.get("window_size", (-1, -1)))
    exact = [x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v, sinks)]
    want, want_lse = dense_attention(*exact[:3], band, sinks=exact[3], softcap=options.get("softcap", 0.0))
    gradients = torch.autograd.grad(want, exact, dout.double())
    rows = positions(str(options.get("layout", "contiguous")), length, ranks)[rank]
    shard = [x[:, rows].requires_grad_() for x in (q, k, v)]
    leaf = sinks.clone().requires_grad_()
    out, lse = dfa_megatron.dist_flash_attn_func(*shard, **arguments(sinks=leaf, return_lse=True, **options))
    *got, dsinks = torch.autograd.grad(out, [*shard, leaf], dout[:, rows])
    tolerance = 2 * TOLERANCE[dtype]
    assert_close(out, want[:, rows], tolerance=tolerance, name="out")
    assert_close(lse, want_lse[:, :, rows], tolerance=tolerance, name="lse")
    for name, mine, whole in zip(("dq", "dk", "dv"), got, gradients[:3], strict=True):
        assert_close(mine, whole[:, rows], tolerance=8 * tolerance, name=name)
    assert dsinks.dtype == leaf.dtype
    if ranks > 1:
        dist.all_reduce(dsinks)
    assert_close(dsinks, gradients[3], tolerance=8 * tolerance, name="dsinks")


def _everything(rank: int, ranks: int) -> None:
    with nan_memory():
        for seed, (schedule, layout) in enumerate(
            [
                ("ring", "contiguous"),
                ("balanced", "contiguous"),
                ("balanced_shared", "contiguous"),
                ("auto", "zigzag"),
            ]
        ):
            for dtype in (torch.float64, torch.bfloat16):
                attend_and_compare(rank, ranks, dtype=dtype, seed=seed, schedule=schedule, layout=layout)
        attend_and_compare(rank, ranks, seed=9, causal=False)
        attend_and_compare(rank, ranks, seed=10, dtype=torch.float32, window_size=(7, 0), kernel="cpu")
        attend_and_compare(rank, ranks, seed=12, softcap=1.5, kernel="reference")
        attend_and_compare(rank, ranks, seed=11, ulysses_degree=2 if ranks % 2 == 0 else 1)


@pytest.mark.support("runtime", "attention sinks and their gradient")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sinks_and_their_summed_gradient_are_exact(ranks: int) -> None:
    if ranks == 1:
        attend_and_compare(0, 1)
    else:
        run_ranks(ranks, _everything)


def _packed(rank: int, ranks: int) -> None:
    length, offsets = ranks * 8, (0, 3, 4, 13, ranks * 8)
    (q, k, v, dout), sinks = inputs(length, 4, torch.float64, 3)
    q, k, v, dout = (x[0] for x in (q, k, v, dout))
    document = torch.bucketize(torch.arange(length), torch.tensor(offsets[1:]), right=True)
    exact = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    same = (document[:, None] == document[None, :]).tril()
    want, _ = dense_attention(*(x[None] for x in exact[:3]), visible=same, sinks=exact[3])
    gradients = torch.autograd.grad(want[0], exact, dout)
    rows = slice(rank * 8, rank * 8 + 8)
    shard, leaf = [x[rows].requires_grad_() for x in (q, k, v)], sinks.clone().requires_grad_()
    out = dfa_megatron.dist_flash_attn_varlen_func(*shard, offsets, causal=True, sinks=leaf)
    *got, dsinks = torch.autograd.grad(out, [*shard, leaf], dout[rows])
    dist.all_reduce(dsinks)
    assert_close(out, want[0, rows], tolerance=1e-12)
    for mine, whole in zip((*got, dsinks), (*(x[rows] for x in gradients[:3]), gradients[3]), strict=True):
        assert_close(mine, whole, tolerance=1e-11)


@pytest.mark.support("runtime", "sinks with packed documents")
def test_packed_documents_have_sinks_too() -> None:
    run_ranks(3, _packed)


def test_a_row_that_sees_nothing_gives_all_its_probability_to_the_sink() -> None:
    from dfa_megatron.runtime.execute.sinks import merge_sinks, sinks_gradient

    out, lse = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -math.inf)
    out[0, 2], lse[0, :, 2] = 1.0, 0.5
    sinks = torch.tensor([0.5, -math.inf])
    merged, merged_lse = merge_sinks(out.clone(), lse, sinks)
    assert merged[0, :2].eq(0).all()
    assert merged[0, 2].tolist() == [[0.5] * 4, [1.0] * 4]
    torch.testing.assert_close(merged_lse[0, 0], torch.tensor([0.5, 0.5, 0.5 + math.log(2)]))
    assert torch.equal(merged_lse[0, 1], lse[0, 1]), "a sink of -inf is none"
    gradient = sinks_gradient(torch.ones_like(out), merged, merged_lse, sinks)
    torch.testing.assert_close(gradient, torch.tensor([-0.5 * 2.0, 0.0]))


CONFIGS = {name: DistAttentionConfig(schedule=name) for name in ("ring", "balanced")}
"""Made outside of regions that are compiled."""


class Layer(torch.nn.Module):
    """Two attentions with sinks of their own, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.sinks = torch.nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for sinks, schedule in zip(self.sinks, ("ring", "balanced"), strict=True):
            q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
            x = x + dfa_megatron.dist_flash_attn_func(
                q, k, v, causal=True, sinks=sinks, config=CONFIGS[schedule]
            ).flatten(-2)
        return x


def _ways(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    layer = Layer()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    ways = {
        "plain": layer,
        "compiled": compiled,
        "full": partial(checkpoint, layer, use_reentrant=False),
        "frames": partial(checkpoint, layer, use_reentrant=False, context_fn=remat.context_fn),
        "re-entrant": partial(remat.remat_checkpoint, layer),
        "selective": partial(checkpoint, layer, use_reentrant=False, context_fn=remat.selective_context_fn),
    }
    torch.manual_seed(1 + rank)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    want: list[torch.Tensor] = []
    for name, way in ways.items():
        layer.zero_grad()
        x.grad = None
        COUNTERS.reset()
        way(x).square().sum().backward()
        got = [x.grad, layer.sinks.grad, *(p.grad for p in layer.qkv.parameters())]
        want = want or [g.clone() for g in got]
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10, msg=name)
        assert COUNTERS.attention_forwards == (4 if name == "full" else 2), name
    assert want[1].abs().min() > 0


def test_every_checkpoint_and_the_compiler_give_the_same_gradients() -> None:
    run_ranks(2, _ways, timeout=120)


def _wrong(rank: int, ranks: int) -> None:
    (q, k, v, _), sinks = inputs(4, 4, torch.float64, rank)

    def attend(**options: Any) -> None:
        dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(agreement_timeout=20.0, **options))

    with pytest.raises(UnsupportedError, match=r"sinks \(3,\).*one number for each of 4 query heads"):
        attend(sinks=sinks[:3])
    with pytest.raises(UnsupportedError, match="a floating tensor"):
        attend(sinks=torch.ones(4, dtype=torch.int64), schedule="ring")
    with pytest.raises(DisagreementError, match=r"request\.sinks"):
        attend(sinks=sinks if rank else None, schedule="balanced")
    with pytest.raises(DisagreementError if rank else UnsupportedError, match="sinks"):
        attend(sinks=sinks if rank else sinks[:2], schedule="balanced_shared")


def test_wrong_sinks_are_an_error_on_every_rank() -> None:
    run_ranks(2, _wrong)


def test_the_module_takes_sinks_when_it_is_called() -> None:
    (q, k, v, _), sinks = inputs(6, 4, torch.float64, 1)
    out = dfa_megatron.DistFlashAttention(causal=True)(q, k, v, sinks=sinks)
    assert_close(out, dense_attention(q, k, v, band_of(causal=True), sinks=sinks)[0], tolerance=1e-12)
