"""Attentions of numerics="invariant" with all ranks in one process, and whether their bits are those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.plan.language.layout import Layout, contiguous, cross
from dfa_megatron.runtime.execute.sinks import exact_sum, sinks_gradient
from tests.fuzz.random_case import draw
from tests.support.attend import Case, Results, results_together, shares


def invariant(case: Case, ranks: int, layout: str | Layout = "contiguous", **options: Any) -> Results:
    """Run all ranks in this process; rows are where the plan has them. Tokens of the results are in order."""
    found = results_together(case, ranks, layout=layout, numerics="invariant", **options)
    if case.sinks is None:
        return found
    dsinks = sinks_gradient(case.dout, found.out, found.lse, case.sinks, partial(exact_sum, None))
    return found._replace(dsinks=dsinks)


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
