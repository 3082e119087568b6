"""Attentions of numerics="invariant" with all ranks in one process, and whether their bits are those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.plan.language.layout import Layout, contiguous, cross
from dfa_megatron.runtime.execute.sinks import ExactSum, merge_sinks, sinks_gradient
from dfa_megatron.runtime.request import Request
from dfa_megatron.sharding import positions_of
from tests.fuzz.random_case import draw
from tests.support.attend import Case, Results, backward_together, forward_together, prepare_together, shares


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


def one_rank(case: Case, **options: Any) -> Results:
    """The same on one rank, which holds the tokens in order."""
    whole = contiguous(case.length, 1)
    return invariant(case, 1, cross(whole, contiguous(case.keys, 1)) if case.keys else whole, **options)


def document(case: Case, number: int) -> tuple[Case, slice]:
    """One document of a pack as a case of its own, and its tokens."""
    tokens = slice(*case.offsets[number : number + 2])
    alone = replace(case, tokens=tokens.stop - tokens.start, offsets=(), batch=1)
    *four, sinks = case._drawn
    alone.__dict__["_drawn"] = (*(x[:, tokens] for x in four), sinks)
    return alone, tokens


def differing(one: Results, other: Results) -> list[str]:
    """Names of the results whose bits differ."""
    pairs = zip(Results._fields, one, other, strict=True)
    return [name for name, a, b in pairs if a is not b and (a is None or b is None or not torch.equal(a, b))]


RANKS = (2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 16)


def compare_drawn(seed: int, number: int, ranks: Sequence[int] = RANKS) -> str:
    """Compare a case drawn at random on several ranks with one rank, and that with dense float64; "" or what is off."""
    drawn = draw(seed, number, "together", ranks=ranks)
    case = replace(drawn.whole, head_dim_v=None, softcap=0.0)
    one = one_rank(case)
    off = [f"{name} {share:.3g}" for name, share in shares(case, one, drawn=True).items() if not share <= 1]
    found = [f"one rank is wrong: {off}"] if off else []
    if names := differing(one, invariant(case, drawn.count, drawn.options["layout"])):
        found.append(f"{names} differ on {drawn.count} ranks in layout {drawn.options['layout']}")
    some = [at for at, (lo, hi) in enumerate(pairwise(case.offsets)) if lo < hi]
    if len(some) > 1:
        alone, tokens = document(case, some[number % len(some)])
        mine = [x if x is None else x[:, :, tokens] if x is one.lse else x[:, tokens] for x in one[:5]]
        if names := differing(Results(*mine), one_rank(alone)._replace(dsinks=None)):
            found.append(f"{names} of tokens {tokens} differ from the document alone")
    return f"{drawn.line}: {'; '.join(found)}" if found else ""
