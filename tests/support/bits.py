"""Attentions of numerics="invariant" with all ranks in one process, and whether their bits are those of one rank."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.runtime.execute.sinks import ExactSum, merge_sinks, sinks_gradient
from dfa_megatron.runtime.request import Request
from dfa_megatron.sharding import positions_of
from tests.support.attend import Case, Results, backward_together, forward_together, prepare_together


def invariant(case: Case, ranks: int, layout: str | Layout = "contiguous", **options: Any) -> Results:
    """Run all ranks in this process; rows are where the plan has them. Tokens of the results are in order."""
    scale = case.softmax_scale or case.head_dim**-0.5
    config = DistAttentionConfig(numerics="invariant", **options)
    asked = case.options | {"softmax_scale": scale, "layout": layout, "cu_seqlens": case.offsets, "config": config}
    request = Request(**asked, sinks=case.with_sinks)
    shards = zip(*(case.held(rank, ranks, layout)[:3] for rank in range(ranks)), strict=True)
    prepared = prepare_together(request, *shards)
    assert len({(p.kernel.name, p.digest) for p in prepared}) == 1, "ranks chose other kernels or plans"
    whole = prepared[0].plan.forward.layout
    assert ranks == 1 or whole == prepared[-1].plan.forward.layout
    of_q, of_kv = ([positions_of(whole.side(side), rank) for rank in range(ranks)] for side in ("q", "kv"))
    q, dout = ([x[:, rows].clone() for rows in of_q] for x in (case.inputs[0], case.dout))
    k, v = ([x[:, rows].clone() for rows in of_kv] for x in case.inputs[1:])
    found = forward_together(prepared, q, k, v)
    if case.sinks is not None:
        found = [merge_sinks(*one, case.sinks) for one in found]
    outs, lses = zip(*found, strict=True)
    gradients = zip(*backward_together(prepared, dout, q, k, v, outs, lses), strict=True)
    order, columns = (torch.cat(rows).argsort() for rows in (of_q, of_kv))
    dq, dk, dv = (torch.cat(parts, 1)[:, its] for parts, its in zip(gradients, (order, columns, columns), strict=True))
    out, lse = torch.cat(outs, 1)[:, order], torch.cat(lses, 2)[:, :, order]
    dsinks = None
    if case.sinks is not None:
        dsinks = sinks_gradient(case.dout, out, lse, case.sinks, ExactSum(None))
    return Results(out, lse, dq, dk, dv, dsinks)
