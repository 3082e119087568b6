"""Every recurrence as a loop over tokens: what the fast kernels compute, in any dtype, for tests and for reading.

All take tokens (batch, tokens, heads, ...) by name, initial states (batch, heads, keys, values) or None, and local
offsets of documents or (); they return (out, final states), one state for each document. They are `Run`s.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.runtime.cu_seqlens import Offsets

ByName = dict[str, torch.Tensor]


def linear_attention(x: ByName, state: torch.Tensor | None = None, documents: Offsets = ()) -> Scanned:
    """S = exp(g) S + k v, out = q S: lightning attention and Mamba-2 (g (batch, tokens, heads)), GLA (g per key).

    In Mamba-2's words q is C, k is B, v is x dt, and g is A dt.
    """

    def step(state: torch.Tensor, t: ByName) -> torch.Tensor:
        g = t["g"][..., None, None] if t["g"].dim() == 2 else t["g"][..., None]
        return g.exp() * state + t["k"][..., None] * t["v"][..., None, :]

    return _scan(step, x, state, documents)


def delta_rule(x: ByName, state: torch.Tensor | None = None, documents: Offsets = ()) -> Scanned:
    """S = exp(g) S, then S + beta k (v - k S), out = q S, with beta (batch, tokens, heads).

    No g: the delta rule. g (batch, tokens, heads): the gated delta rule. g per key: KDA.
    """

    def step(state: torch.Tensor, t: ByName) -> torch.Tensor:
        if "g" in t:
            g = t["g"][..., None, None] if t["g"].dim() == 2 else t["g"][..., None]
            state = g.exp() * state
        seen = torch.einsum("bhk,bhkv->bhv", t["k"], state)
        return state + t["k"][..., None] * (t["beta"][..., None] * (t["v"] - seen))[..., None, :]

    return _scan(step, x, state, documents)


Scanned = tuple[torch.Tensor, torch.Tensor]
TokenStep = Callable[[torch.Tensor, ByName], torch.Tensor]


def _scan(step: TokenStep, x: ByName, state: torch.Tensor | None, documents: Offsets) -> Scanned:
    """Run over tokens, from the initial state of each document or from zero."""
    if documents:
        starts = [None] * (len(documents) - 1) if state is None else state.split(1)
        pieces = [{name: t[:, lo:hi] for name, t in x.items()} for lo, hi in pairwise(documents)]
        found = [_scan(step, piece, start, ()) for piece, start in zip(pieces, starts, strict=True)]
        return torch.cat([out for out, _ in found], 1), torch.cat([final for _, final in found])
    batch, tokens, heads, values = x["v"].shape
    dtype = accumulator_dtype(x["v"].dtype)
    if state is None:
        state = x["v"].new_zeros((batch, heads, x["k"].shape[3], values), dtype=dtype)
    out = []
    for token in range(tokens):
        now = {name: t[:, token].to(dtype) for name, t in x.items()}
        state = step(state, now)
        out.append(torch.einsum("bhk,bhkv->bhv", now["q"], state))
    return torch.stack(out, 1).to(x["v"].dtype), state
