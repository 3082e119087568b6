"""The tensors of a case, what dense float64 attention makes of them, and how far off a result may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.sharding import layout_of_tokens, positions_of
from tests.fuzz.random_case import Case

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Largest norm of an output's error over the norm of the output; gradients have four times as much."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Hold a whole sequence: q, k, v and dout (batch, tokens, heads, width), and sinks and slopes (heads,)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Results:
    """out (batch, tokens, heads, width), lse (batch, heads, tokens), and the gradients of q, k, v and sinks.

    Of the whole sequence, or of a rank's rows; dsinks are the sum of all rows then, or None without sinks.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None


def tensors(case: Case) -> Tensors:
    """Draw random tensors, the same for the same case on every rank."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.number)
    dtype = getattr(torch, case.dtype)

    def rows(heads: int, width: int) -> torch.Tensor:
        shape = (case.tokens, case.batch) if case.strided else (case.batch, case.tokens)
        x = torch.randn(*shape, heads, width, generator=generator, dtype=torch.float64).to(case.device, dtype)
        return x.transpose(0, 1) if case.strided else x

    def numbers() -> torch.Tensor:
        return torch.randn(case.heads, generator=generator, dtype=torch.float64).to(case.device)

    return Tensors(
        q=rows(case.heads, case.head_dim),
        k=rows(case.kv_heads, case.head_dim),
        v=rows(case.kv_heads, case.head_dim_v),
        dout=rows(case.heads, case.head_dim_v),
        sinks=numbers() if case.sinks else None,
        slopes=(numbers().abs() / 4).float() if case.alibi else None,
    )


def dense(case: Case, given: Tensors) -> Results:
    """Compute the results in float64, one document after another."""
    leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in (given.q, given.k, given.v)]
    sinks = None if given.sinks is None else given.sinks.clone().requires_grad_()
    options = {name: case.options[name] for name in ("softcap", "softmax_scale")}
    outs, lses = [], []
    for lo, hi in pairwise(case.offsets):
        at = torch.arange(hi - lo, dtype=torch.float64, device=case.device)
        distance = (at[:, None] - at).abs()
        bias = None if given.slopes is None else -given.slopes.double()[:, None, None] * distance
        visible = case.options.get("mask") or band_of(case.options["causal"], case.options["window_size"])
        q, k, v = (x[:, lo:hi] for x in leaves)
        out, lse = dense_attention(q, k, v, visible, sinks=sinks, bias=bias, **options)
        outs.append(out)
        lses.append(lse.detach())
    out = torch.cat(outs, 1)
    dq, dk, dv, *rest = torch.autograd.grad(out, [*leaves, *([] if sinks is None else [sinks])], given.dout.double())
    return Results(out.detach(), torch.cat(lses, 2), dq, dk, dv, rest[0] if rest else None)


def rows_of(case: Case, rank: int) -> torch.Tensor:
    """Return the places of a rank's tokens in the whole sequence."""
    whole = layout_of_tokens(
        case.options["layout"], case.tokens, case.ranks, case.offsets if case.packed else None
    )  # fmt: skip
    return positions_of(whole, rank, case.device)


def distances(case: Case, got: Results, want: Results, given: Tensors) -> dict[str, float]:
    """By the name of a result: how far it is from the wanted one, as a share of what is tolerated; inf for NaN.

    Errors of gradients are also compared with a quarter of dout, for a gradient may be 0.
    """
    tolerance = TOLERANCE[given.q.dtype]
    ground = 0.25 * float(given.dout.double().norm())
    found = {}
    for name in ("out", "lse", "dq", "dk", "dv", "dsinks"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if theirs is None:
            continue
        gradient = name.startswith("d")
        least = ground if gradient else 1.0 if name == "lse" else 0.0
        found[name] = _distance(mine, theirs, least) / (tolerance * (4 if gradient else 1))
    return found


def _distance(got: torch.Tensor, want: torch.Tensor, least: float) -> float:
    """|got - want| over |want| or `least`; infinities must be in the same places."""
    if got.shape != want.shape:
        return math.inf
    a, b = got.detach().double(), want.double()
    if bool(((a != b) & (a.isinf() | b.isinf())).any()) or bool(a.isnan().any()):
        return math.inf
    error = float(torch.where(b.isfinite(), a - b, 0.0).norm())
    size = max(least, float(torch.where(b.isfinite(), b, 0.0).norm()))
    return error if size == 0 else error / size
