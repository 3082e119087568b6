"""The Triton kernels of learned-sparse attention, in the interpreter or on a GPU, against plain functions in
float64.
"""

from __future__ import annotations

import sys

import pytest
import torch

from dfa_megatron import masks
from dfa_megatron.indexed import chosen, index_loss, topk
from dfa_megatron.indexed.whole import kernels_for
from dfa_megatron.kernels.adapters import cudnn_sparse
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.masks import Span
from tests.support.close import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = pytest.mark.skipif(not (interpreted() or torch.cuda.is_available()), reason="neither interpreter nor GPU")
pytestmark = [pytest.mark.gpu(0)] if torch.cuda.is_available() else []
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@HERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 3, 40, 32), (2, 2, 9, 5), (1, 18, 16, 16)])
def test_results_and_their_gradients(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    kv_heads, group, dim, width = sizes
    torch.manual_seed(dim)
    values = (0, width) if kv_heads == 1 else (dim, dim + width)
    q = torch.randn(9, kv_heads * group, dim, device=DEVICE).to(dtype)
    kv = torch.randn(30, kv_heads, max(dim, values[1]), device=DEVICE).to(dtype)
    positions = torch.stack([torch.randperm(30)[:40] for _ in range(9)]).int().to(DEVICE)
    positions[torch.rand(positions.shape, device=DEVICE) < 0.4] = -1
    positions[4] = -1
    dout = torch.randn(9, kv_heads * group, width, device=DEVICE).to(dtype)
    assert kernels_for(q) is not None
    found = chosen.attend(q, kv, positions, 0.3, values)
    want = chosen.attend(q.double(), kv.double(), positions, 0.3, values)
    given = chosen.gradients(dout, (q, kv, positions), found, 0.3, values)
    exact = chosen.gradients(dout.double(), (q.double(), kv.double(), positions), want, 0.3, values)
    for got, wanted in zip((*found, *given), (*want, *exact), strict=True):
        assert got.dtype == torch.float32
        assert_close(got, wanted, tolerance=TOLERANCE[dtype])


def test_deterministic_gradients_are_added_by_pytorch() -> None:
    x = torch.zeros(1, 2, 16, device=DEVICE)
    assert kernels_for(x, adds=True) is kernels_for(x)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels_for(x, adds=True) is None
        assert not cudnn_sparse.takes(x, x, x, (0, 512))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("levels", [3, 50, 1_000_000])
@pytest.mark.parametrize(("rows", "keys", "count"), [(50, 300, 20), (50, 300, 400), (20, 64, 64), (30, 1, 1)])
def test_the_best_scores_are_those_of_a_stable_sort(rows: int, keys: int, count: int, levels: int) -> None:
    """Few levels make many equal scores, also where the choice ends."""
    sparse = pytest.importorskip("dfa_megatron.kernels.triton.sparse")
    scores = torch.randint(-levels, levels, (rows, keys)).float() / 7
    scores[torch.rand(rows, keys) < 0.3] = -torch.inf
    scores[0], scores[1] = -torch.inf, 0.0
    ordered = scores.sort(dim=1, descending=True, stable=True)
    want = (ordered.indices + 5).masked_fill(ordered.values == -torch.inf, -1)[:, :count].int()
    assert torch.equal(sparse.best(scores, 5, count), want)


NVIDIA = pytest.mark.skipif(
    not cudnn_sparse.serves(torch.zeros(1, device=DEVICE)), reason="no Hopper, or no nvidia-cudnn-frontend"
)


@NVIDIA
@pytest.mark.parametrize("levels", [3, 50, 1_000_000])
@pytest.mark.parametrize(("rows", "keys", "count"), [(50, 5000, 2048), (3, 2048, 2048), (70, 300, 20), (1, 1, 1)])
def test_nvidias_best_places_are_those_of_a_stable_sort(rows: int, keys: int, count: int, levels: int) -> None:
    scores = torch.randint(-levels, levels, (rows, keys), device="cuda").float() / 7 + 0.0
    scores[torch.rand(rows, keys, device="cuda") < 0.3] = -torch.inf
    scores[0] = -torch.inf
    found = cudnn_sparse.best_places(scores, count)
    assert found is not None
    want = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(found.sort(1).values, want.sort(1).values)


@NVIDIA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim", "topk"), [(128, 576, 2048), (64, 576, 100), (16, 512, 64), (40, 576, 7)])
def test_nvidias_gradients_of_latents(heads: int, dim: int, topk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    rows, tokens = 70, 2100
    q, kv = torch.randn(rows, heads, dim, device="cuda").to(dtype), torch.randn(tokens, 1, dim, device="cuda").to(dtype)
    positions = torch.stack([torch.randperm(tokens, device="cuda")[:topk] for _ in range(rows)]).int()
    positions[torch.rand(positions.shape, device="cuda") < 0.3] = -1
    positions[3], dout = -1, torch.randn(rows, heads, 512, device="cuda").to(dtype)
    assert cudnn_sparse.takes(q, kv, positions, (0, 512))
    out, lse = chosen.attend(q.double(), kv.double(), positions, 0.05, (0, 512))
    lse[::2] += 0.1  # of sinks
    out[::2] *= 0.9048374180359595
    exact = chosen.gradients(dout.double(), (q.double(), kv.double(), positions), (out, lse), 0.05, (0, 512))
    given = chosen.gradients(dout, (q, kv, positions), (out.to(dtype), lse.float()), 0.05, (0, 512))
    for got, wanted in zip(given, exact, strict=True):
        assert got.dtype == dtype
        assert_close(got, wanted, tolerance=TOLERANCE[torch.bfloat16])


@HERE
def test_kernels_choose_the_same_keys() -> None:
    index = [torch.randint(-2, 3, shape, device=DEVICE).float() for shape in ((40, 3, 5), (60, 5), (40, 3))]
    seen, spans = masks.documents([10, 1, 30, 19]), [Span(50, 60), Span(3, 33)]
    found = topk.choose(*index, 6, seen, spans)
    want = topk.choose(*(x.double() for x in index), 6, seen, spans)
    assert torch.equal(found[0], want[0])
    assert_close(found[1], want[1], tolerance=1e-6)


@HERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 3, 40, 5, 30), (2, 2, 9, 2, 70)])
def test_the_loss_over_chosen_keys(sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_heads, group, dim, index_heads, count = sizes
    torch.manual_seed(count)
    tokens, heads, found = 90, kv_heads * group, []
    monkeypatch.setattr(sys.modules["dfa_megatron.indexed.index_loss"], "MEMORY", 160 * count)  # 40 rows at a time

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=DEVICE).to(dtype)

    index = [draw(index_heads, 12), draw(12), draw(index_heads) / 4]
    q, k, valid = draw(heads, dim), draw(kv_heads, dim + 4), torch.rand(1, tokens, device=DEVICE) < 0.8
    scores = torch.rand(tokens, tokens, device=DEVICE).tril(-1)  # the first row has no key
    positions = scores.topk(count).indices.int()[None].masked_fill(scores.topk(count).values[None] <= 0.2, -1)
    assert kernels_for(q) is not None
    lse = chosen.attend(q.double()[0], k.double()[0], positions[0], dim**-0.5, (0, 1))[1].T[None]
    for kind in (dtype, torch.float64):
        own = [x.to(kind).requires_grad_() for x in index]
        loss = index_loss(*own, q.to(kind), k.to(kind), lse.to(kind).float(), positions, valid=valid)
        found.append((loss, *torch.autograd.grad(loss, own)))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, tolerance=TOLERANCE[dtype])
