"""ALiBi by global position: exact against dense attention with its bias, wherever ranks hold their tokens."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.dense import band_mask, band_of, dense_attention
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.pack_planner import PackPlanner
from dfa_megatron.runtime import rank_plan
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.request import Request
from tests.support.arguments import arguments
from tests.support.cases import TOLERANCE, Tensors, positions
from tests.support.close import assert_close
from tests.support.nan_memory import nan_memory
from tests.support.packs import random_offsets, tokens_of
from tests.support.together import backward_together, forward_together, prepare_together
from tests.support.workers import run_ranks

KERNEL = "triton" if interpreted() else "reference"
"""What computes with all ranks in one process: the file is run again in Triton's interpreter."""
DTYPE = torch.float32 if interpreted() else torch.float64
RANKS = (3,) if interpreted() else (1, 2, 3, 8)
SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "batch": 1} if interpreted() else {}
SCHEDULES = (
    ("ring", "contiguous"),
    ("balanced", "contiguous"),
    ("balanced_shared", "contiguous"),
    ("greedy", "contiguous"),
    ("auto", "zigzag"),
    ("auto", "load_balanced"),
)
MASKS = {
    "causal": (True, (-1, -1)),
    "full": (False, (-1, -1)),
    "causal window": (True, (7, 0)),
    "two sides": (False, (5, 3)),
    "left window": (False, (3, -1)),
}


class Whole:
    """Inputs of a whole sequence or pack, without or with a batch, and what dense attention makes of them."""

    def __init__(
        self,
        length: int,
        *,
        offsets: tuple[int, ...] = (),
        batch: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        **mask: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = 1 if offsets else batch

        def draw(count: int) -> torch.Tensor:
            return torch.randn((batch, length, count, 8), generator=generator, dtype=torch.float64).to(dtype)

        self.inputs: Tensors = (draw(heads), draw(kv_heads), draw(kv_heads))
        self.dout = draw(heads)
        # From hardly felt to a few tokens' reach, each head another.
        self.slopes = 2.0 ** (-4 + 4 * torch.rand(heads, generator=generator))
        where = torch.arange(length)
        document = torch.bucketize(where, torch.tensor(offsets[1:-1]), right=True)
        self.exact = tuple(x.double().clone().requires_grad_() for x in self.inputs)
        more = {name: mask.pop(name) for name in ("softcap", "sinks") if name in mask}
        self.out, self.lse = dense_attention(
            *self.exact,
            band_mask(length, length, band_of(**{"causal": True, **mask})) & (document[:, None] == document),
            bias=-self.slopes.double()[:, None, None] * (where[:, None] - where[None, :]).abs(),
            **more,
        )
        self.gradients = torch.autograd.grad(self.out, self.exact, self.dout.double())


def together(request: Request, whole: Whole, where: list[torch.Tensor]) -> None:
    """Outputs, lse and gradients of every rank."""

    def shards(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, rows] for rows in where]

    inputs = [shards(x) for x in whole.inputs]
    prepared = prepare_together(request, *inputs)
    results = forward_together(prepared, *inputs, whole.slopes)
    outs, lses = [out for out, _ in results], [lse for _, lse in results]
    gradients = backward_together(prepared, shards(whole.dout), *inputs, outs, lses, whole.slopes)
    tolerance = 4 * TOLERANCE[whole.dout.dtype]
    for rank, rows in enumerate(where):
        assert_close(outs[rank], whole.out[:, rows], tolerance=tolerance, name=f"out of rank {rank}")
        assert_close(lses[rank], whole.lse[:, :, rows], tolerance=tolerance, name=f"lse of rank {rank}")
    for at, name in enumerate(("dq", "dk", "dv")):
        got = torch.empty_like(whole.gradients[at])
        for rows, shard in zip(where, gradients, strict=True):
            got[:, rows] = shard[at].double()
        assert_close(got, whole.gradients[at], tolerance=4 * tolerance, name=name)


@pytest.mark.support("runtime", "ALiBi with every schedule and layout, plain and packed")
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES[:5])
def test_every_schedule_is_exact_on_odd_and_even_ranks(schedule: str, layout: str, mask: str) -> None:
    causal, window = MASKS[mask]
    served = 0
    for ranks in RANKS:
        draw = random.Random(f"{schedule} {mask} {ranks}")
        local = draw.randrange(2, 6) * 2 + (draw.randrange(2) if layout == "contiguous" else 0)
        shape = {"kv_heads": draw.choice([1, 2, 4])} | SMALL
        whole = Whole(ranks * local, seed=ranks, dtype=DTYPE, causal=causal, window_size=window, **shape)
        request = Request(
            **arguments(
                softmax_scale=8**-0.5,
                causal=causal,
                window_size=window,
                schedule=schedule,
                layout=layout,
                kernel=KERNEL,
                alibi=True,
            )
        )
        try:
            together(request, whole, positions(layout, ranks * local, ranks))
        except UnsupportedError:
            assert schedule.startswith("balanced")
            continue
        served += 1
    assert served or schedule.startswith("balanced")


@pytest.mark.support("runtime", "ALiBi with every schedule and layout, plain and packed")
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES)
def test_packed_documents_are_exact_in_every_layout(schedule: str, layout: str, mask: str) -> None:
    causal, window = MASKS[mask]
    for ranks in RANKS:
        draw = random.Random(f"{schedule} {mask} {ranks}")
        tokens = ranks * draw.randrange(2, 8) * 2
        offsets = random_offsets(tokens, draw)
        mask = {"causal": causal, "window_size": window}
        whole = Whole(tokens, offsets=offsets, seed=ranks, dtype=DTYPE, **mask, **SMALL)
        request = Request(
            **arguments(
                softmax_scale=8**-0.5,
                causal=causal,
                window_size=window,
                schedule=schedule,
                layout=layout,
                kernel=KERNEL,
                cu_seqlens=offsets,
                alibi=True,
            )
        )
        try:
            together(request, whole, tokens_of(layout, offsets, ranks))
        except UnsupportedError:
            assert schedule.startswith("balanced")


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.skipif(interpreted(), reason="this is the run in the interpreter")
def test_the_triton_kernels_are_exact_too_in_the_interpreter() -> None:
    chosen = "odd and zigzag and sides or packed and load_balanced and left"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


# Real processes over gloo.


def attend_and_compare(
    rank: int, ranks: int, *, length: int = 0, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> None:
    """A forward and backward of this rank's rows by the public functions."""
    length, offsets, device = length or ranks * 10, options.pop("offsets", ()), options.pop("device", "cpu")
    shape = {name: options.pop(name) for name in ("heads", "kv_heads") if name in options}
    dense = {name: options[name] for name in ("causal", "window_size", "softcap", "sinks") if name in options}
    whole = Whole(length, offsets=offsets, dtype=dtype, seed=seed, **shape, **dense)
    layout = str(options.get("layout", "contiguous"))
    rows = (tokens_of(layout, offsets, ranks) if offsets else positions(layout, length, ranks))[rank]
    shard = [x[:, rows].to(device).requires_grad_() for x in whole.inputs]
    options |= {"alibi_slopes": whole.slopes.to(device), "return_lse": True}
    if offsets:
        out, lse = dfa_megatron.dist_flash_attn_varlen_func(*(x[0] for x in shard), offsets, **arguments(**options))
        out, lse = out[None], lse[None]
    else:
        out, lse = dfa_megatron.dist_flash_attn_func(*shard, **arguments(**options))
    gradients = torch.autograd.grad(out, shard, whole.dout[:, rows].to(device))
    tolerance = 2 * TOLERANCE[dtype]
    assert_close(out, whole.out[:, rows], tolerance=tolerance, name="out")
    assert_close(lse, whole.lse[:, :, rows], tolerance=tolerance, name="lse")
    for name, got, want in zip(("dq", "dk", "dv"), gradients, whole.gradients, strict=True):
        assert_close(got, want[:, rows], tolerance=8 * tolerance, name=name)


def _everything(rank: int, ranks: int) -> None:
    with nan_memory():
        for seed, (schedule, layout) in enumerate((*SCHEDULES[:3], SCHEDULES[4])):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                attend_and_compare(rank, ranks, dtype=dtype, seed=seed, schedule=schedule, layout=layout)
        attend_and_compare(rank, ranks, seed=9, causal=False)
        attend_and_compare(rank, ranks, seed=10, window_size=(7, 0), heads=6, kv_heads=1)
        attend_and_compare(rank, ranks, seed=11, softcap=1.5, sinks=torch.linspace(-2, 2, 4, dtype=torch.float64))
        offsets = (0, 3, 4, 13, ranks * 16)
        for layout in ("contiguous", "zigzag", "load_balanced"):
            attend_and_compare(rank, ranks, length=ranks * 16, offsets=offsets, layout=layout)
            attend_and_compare(rank, ranks, length=ranks * 16, offsets=offsets, layout=layout, causal=False)


@pytest.mark.support("runtime", "ALiBi between processes, packs among it")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_public_functions_are_exact(ranks: int) -> None:
    if ranks == 1:
        _everything(0, 1)
    else:
        run_ranks(ranks, _everything, timeout=120)


def _exchanged(rank: int, ranks: int) -> None:
    with nan_memory():
        for heads, kv_heads in ((4, 4), (12, 6), (8, 1)):
            for layout in ("contiguous", "zigzag"):
                attend_and_compare(
                    rank, ranks, length=4 * ranks, layout=layout, ulysses_degree=2, heads=heads, kv_heads=kv_heads
                )
        attend_and_compare(rank, ranks, length=4 * ranks, ulysses_degree=ranks, heads=4, kv_heads=2)
        attend_and_compare(rank, ranks, length=8 * ranks, offsets=(0, 5, 9, 8 * ranks), ulysses_degree=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slopes_go_with_their_heads_where_ranks_exchange_them(ranks: int) -> None:
    run_ranks(ranks, _exchanged, timeout=120)


def _ahead(rank: int, ranks: int) -> None:
    offsets = (0, 3, 4, 13, ranks * 16)
    for layout in ("contiguous", "load_balanced"):
        options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float64, "device": "cpu"}
        known = PackPlanner(16, **arguments(**options, layout=layout, alibi=True))(offsets)
        rank_plan.planned.cache_clear()
        pickle.loads(pickle.dumps(known)).use()  # noqa: S301 (our own)
        attend_and_compare(rank, ranks, length=ranks * 16, offsets=offsets, layout=layout)
        assert rank_plan.planned.cache_info().misses == 0


def test_a_pack_planned_ahead_knows_the_tokens_of_its_rows() -> None:
    run_ranks(2, _ahead)


CONFIGS = {name: DistAttentionConfig(schedule=name) for name in ("ring", "balanced")}
"""Made outside of regions that are compiled."""


class Layer(torch.nn.Module):
    """Two attentions with slopes of their own, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.register_buffer("slopes", torch.tensor([[0.5, 0.25], [0.125, 1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for slopes, schedule in zip(self.slopes, ("ring", "balanced"), strict=True):
            q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
            x = x + dfa_megatron.dist_flash_attn_func(
                q, k, v, causal=True, alibi_slopes=slopes, config=CONFIGS[schedule]
            ).flatten(-2)
        return x


def _ways(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    layer = Layer()
    ways = {
        "plain": layer,
        "compiled": torch.compile(layer, backend="aot_eager", fullgraph=True),
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
        got = [x.grad, *(p.grad for p in layer.qkv.parameters())]
        want = want or [g.clone() for g in got]
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10, msg=name)
        assert COUNTERS.attention_forwards == (4 if name == "full" else 2), name


def test_every_checkpoint_and_the_compiler_give_the_same_gradients() -> None:
    run_ranks(2, _ways, timeout=120)


def _wrong(rank: int, ranks: int) -> None:
    whole = Whole(4, seed=rank)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def attend(**options: Any) -> None:
        dfa_megatron.dist_flash_attn_func(*whole.inputs, **arguments(agreement_timeout=20.0, **options))

    with pytest.raises(UnsupportedError, match=r"alibi_slopes \(3,\).*one number for each of 4 query heads"):
        attend(alibi_slopes=slopes[:3])
    with pytest.raises(UnsupportedError, match=r"a float32 tensor \(heads,\) on cpu"):
        attend(alibi_slopes=slopes.double(), schedule="ring")
    with pytest.raises(UnsupportedError, match=r"require a gradient.*alibi_slopes\.detach\(\)"):
        attend(alibi_slopes=slopes.clone().requires_grad_())
    with pytest.raises(UnsupportedError, match=r"kernel='cpu'.*adds no ALiBi.*kernel='reference'"):
        attend(alibi_slopes=slopes, kernel="cpu")
    with pytest.raises(DisagreementError, match=r"request\.alibi: (True|False) on rank"):
        attend(alibi_slopes=slopes if rank else None, schedule="balanced")
    with pytest.raises(DisagreementError, match=r"alibi_slopes: 0\.5, 0\.25, 0\.125, 0\.0625 \(digest"):
        attend(alibi_slopes=slopes * (1 + rank), schedule="balanced")
    with pytest.raises(DisagreementError if rank else UnsupportedError, match="alibi_slopes"):
        attend(alibi_slopes=slopes if rank else slopes[:2], schedule="balanced_shared")


def test_wrong_slopes_are_an_error_on_every_rank() -> None:
    run_ranks(2, _wrong)


def test_slopes_that_require_a_gradient_are_refused_by_what_is_compiled() -> None:
    whole = Whole(6)
    slopes = whole.slopes.clone().requires_grad_()
    compiled = torch.compile(dfa_megatron.dist_flash_attn_func, backend="aot_eager")
    with pytest.raises(Exception, match="require a gradient"):
        compiled(*whole.inputs, causal=True, alibi_slopes=slopes)


def test_the_module_takes_slopes_when_it_is_called() -> None:
    whole = Whole(6, seed=1)
    module = dfa_megatron.DistFlashAttention(causal=True)
    assert_close(module(*whole.inputs, alibi_slopes=whole.slopes), whole.out, tolerance=1e-12)


# GPUs.


def _on_gpus(rank: int, ranks: int) -> None:
    options: dict[str, Any] = {"length": ranks * 160, "dtype": torch.bfloat16, "device": "cuda"}
    offsets = (0, 30, 31, 130, ranks * 160)
    for kernel in ("triton", "reference"):
        for seed, (schedule, layout) in enumerate((*SCHEDULES[:3], SCHEDULES[4])):
            attend_and_compare(rank, ranks, seed=seed, kernel=kernel, schedule=schedule, layout=layout, **options)
        attend_and_compare(rank, ranks, seed=8, kernel=kernel, causal=False, **options)
        attend_and_compare(rank, ranks, seed=9, kernel=kernel, window_size=(40, 0), **options)
        for layout in ("contiguous", "zigzag", "load_balanced"):
            attend_and_compare(rank, ranks, offsets=offsets, kernel=kernel, layout=layout, **options)
    for seed in (10, 11, 12):  # a graph sees the slopes of each call
        attend_and_compare(rank, ranks, seed=seed, kernel="triton", cuda_graph=True, **options)


@pytest.mark.gpu(1)
def test_one_gpu_is_exact() -> None:
    _on_gpus(0, 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_layout_and_pack_is_exact_over_nccl(ranks: int) -> None:
    run_ranks(ranks, _on_gpus, cuda=True, timeout=170)
