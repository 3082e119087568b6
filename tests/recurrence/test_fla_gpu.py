"""Kernels of flash-linear-attention and mamba-ssm on GPUs, in bfloat16 against a token loop in float64."""

from __future__ import annotations

import importlib
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dfa_megatron.layouts import of_lengths
from dfa_megatron.recurrence import Decay, dist_mamba2, fla_scan
from dfa_megatron.recurrence.fold import fold
from dfa_megatron.recurrence.local_scan import local_scan
from dfa_megatron.recurrence.share import Share
from dfa_megatron.recurrence.token_loop import delta_rule, linear_attention
from tests.support.close import assert_close
from tests.support.recurrences import by_path
from tests.support.workers import run_ranks

pytestmark = pytest.mark.timeout(900)  # kernels compile for minutes

HEADS, DIM = 2, 64
KERNELS = {"gated_delta_rule": "chunk_gated_delta_rule", "kda": "chunk_kda", "simple_gla": "chunk_simple_gla"}


def _tokens(kind: str, length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, HEADS, *shape, device="cuda")

    q, k, v = (normal(DIM) for _ in range(3))
    tokens = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    tokens["g"] = -0.02 * (normal(DIM) if kind == "kda" else normal()).abs()
    if kind != "simple_gla":
        tokens["beta"] = normal().sigmoid()
    return {name: x if name == "g" else x.bfloat16() for name, x in tokens.items()}


def _outputs(
    kind: str, tokens: list[dict[str, torch.Tensor]], offsets: tuple[int, ...], parents: tuple[int, ...]
) -> torch.Tensor:
    """Fold over lists in place of an all-gather."""
    scan = fla_scan(getattr(importlib.import_module(f"fla.ops.{kind}"), KERNELS[kind]), scale=1.0)
    edges = tuple(accumulate((x["q"].shape[1] for x in tokens), initial=0))
    shares = [Share(rank, edges, offsets, parents) for rank in range(len(tokens))]
    found = []
    for x, share in zip(tokens, shares, strict=True):
        decay = Decay(x["q"], x["g"]) if kind == "simple_gla" else None
        found.append(local_scan(scan, x, share, decay))
    outs = []
    for share, local in zip(shares, found, strict=True):
        sent = {piece: each.carries[piece] for each in found for piece in each.share.sent[each.share.rank]}
        came = fold(sent, share.source, brought := share.brought[share.rank], matrix=local.matrix)
        outs.append(local.finish(torch.stack([came[piece] for piece in brought]) if brought else None)[0])
    return torch.cat(outs, 1)


PACK: tuple[int, ...] = (0, 1, 200, 201, 999)
CASES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ()), (PACK, ()), (PACK, (-1, 0, 1, 0))]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("offsets", "parents"), CASES)
def test_kernels_of_fla_are_exact_over_ranks(kind: str, offsets: tuple[int, ...], parents: tuple[int, ...]) -> None:
    pytest.importorskip("fla")
    edges = (0, 420, 619, 999)
    whole = _tokens(kind, edges[-1])
    mine = [{n: x[:, lo:hi].clone().requires_grad_() for n, x in whole.items()} for lo, hi in pairwise(edges)]
    reference: Any = linear_attention if kind == "simple_gla" else delta_rule
    wide = {name: x.double().requires_grad_() for name, x in whole.items()}
    wanted = by_path(lambda x: reference(x, None, ())[0], wide, offsets or (0, edges[-1]), parents)
    out = _outputs(kind, mine, offsets, parents)
    assert_close(out, wanted, tolerance=2e-2, name="out")
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(wanted, list(wide.values()), dout.double())
    leaves = [x for rank in mine for x in rank.values()]
    try:
        found = torch.autograd.grad(out, leaves, dout)
    except RuntimeError as error:
        if "incorrect results" not in str(error):
            raise
        pytest.skip(f"the outputs are exact, and fla refuses its backward here: {error}")
    for at, name in enumerate(whole):
        assert_close(torch.cat(found[at :: len(whole)], 1), gradients[at], tolerance=4e-2, name=f"gradient of {name}")


def _mamba(rank: int, ranks: int, uneven: tuple[int, ...]) -> None:
    """Mamba-2, whose state is (head_dim, states); documents by seq_idx, or one call each."""
    kernel = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    torch.manual_seed(sum(uneven))
    shapes = {"x": (2 * HEADS, DIM), "dt": (2 * HEADS,), "B": (HEADS, DIM), "C": (HEADS, DIM)}
    whole = {name: torch.randn(1, PACK[-1], *shape, device="cuda").bfloat16() for name, shape in shapes.items()}
    a, lo = -torch.rand(2 * HEADS, device="cuda"), sum(uneven[:rank])

    def alone(x: dict[str, torch.Tensor]) -> torch.Tensor:
        dt = F.softplus(x["dt"] - 2)
        q, k = (x[name].repeat_interleave(2, 2) for name in ("C", "B"))
        return linear_attention({"q": q, "k": k, "v": x["x"] * dt[..., None], "g": dt * a.double()})[0]

    for offsets, parents in CASES:
        wide = {name: x.double().requires_grad_() for name, x in whole.items()}
        wanted = by_path(alone, wide, offsets or (0, PACK[-1]), parents)
        dout = torch.randn_like(wanted)
        gradients = dict(zip(wide, torch.autograd.grad(wanted, list(wide.values()), dout), strict=True))
        where: Any = {"cu_seqlens": offsets, "parents": parents} if parents else {"cu_seqlens": offsets or None}
        for packs in (True, False):
            mine = {n: x[:, lo : lo + uneven[rank]].clone().requires_grad_() for n, x in whole.items()}
            options: Any = {"chunk_size": 64, "dt_softplus": True, "dt_bias": torch.full_like(a, -2)}
            out, _ = dist_mamba2(kernel, mine, a, packs=packs, layout=of_lengths(uneven), **where, **options)
            out.backward(dout[:, lo : lo + uneven[rank]].to(out.dtype))
            assert_close(out, wanted[:, lo : lo + uneven[rank]], tolerance=2e-2, name="out")
            for name, x in mine.items():
                wants = gradients[name][:, lo : lo + uneven[rank]]
                assert_close(x.grad, wants, tolerance=4e-2, name=f"gradient of {name}")


@pytest.mark.gpu
def test_the_kernel_of_mamba_is_exact_over_ranks() -> None:
    pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    run_ranks(2, _mamba, (420, 579), cuda=True, timeout=800)
