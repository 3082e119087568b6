"""Random recurrences of every kind: their tokens, their one-process results, and how they are distributed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from dfa_megatron.layouts import Layout, contiguous, of_lengths
from dfa_megatron.recurrence import Decay, Scan
from dfa_megatron.recurrence.token_loop import delta_rule, linear_attention
from tests.support.plan_cases import ancestors, some_parents

BATCH, HEADS, KEYS, VALUES = 2, 2, 3, 4
KINDS = ("mamba2", "gla", "mamba1", "delta", "gated_delta", "kda")

Tokens = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recurrence:
    """One kind: its tokens, its kernel, and the decays where they multiply elementwise."""

    kind: str
    tokens: Tokens
    scan: Scan
    dout: torch.Tensor

    def decay(self, tokens: Tokens) -> Decay | None:
        """The closed way, for the kinds that have one."""
        return Decay(tokens["q"], tokens["g"]) if self.scan.run is linear_attention else None

    def rows(self, rank: int, ranks: int, layout: Layout | None = None) -> Tokens:
        """A rank's tokens, as leaves that need gradients."""
        mine = rows_of(layout or contiguous(self.dout.shape[1], ranks), rank)
        return {name: x[:, mine].clone().requires_grad_() for name, x in self.tokens.items()}

    def whole(self, offsets: tuple[int, ...] = (), parents: Sequence[int] = ()) -> tuple[torch.Tensor, Tokens]:
        """(out, gradient by name) of one process: every path alone, token by token."""
        tokens = {name: x.clone().requires_grad_() for name, x in self.tokens.items()}
        out = by_path(
            lambda path: self.scan.run(path, None, ())[0], tokens, offsets or (0, self.dout.shape[1]), parents
        )
        gradients = torch.autograd.grad(out, list(tokens.values()), self.dout)
        return out.detach(), dict(zip(tokens, gradients, strict=True))


def rows_of(layout: Layout, rank: int) -> slice:
    """A rank's contiguous tokens."""
    lo = sum(map(layout.tokens, range(rank)))
    return slice(lo, lo + layout.tokens(rank))


def uneven(length: int, ranks: int, draw: random.Random) -> Layout:
    """Contiguous tokens, whose numbers are random and often zero."""
    cuts = sorted(draw.choices(range(length + 1), k=ranks - 1))
    return of_lengths([hi - lo for lo, hi in pairwise((0, *cuts, length))])


def by_path(
    run: Callable[[Tokens], torch.Tensor],
    x: Tokens,
    offsets: tuple[int, ...],
    parents: Sequence[int] = (),
    dim: int = 1,
) -> torch.Tensor:
    """What a function of tokens along a dimension makes of every segment, at the end of its own path."""
    spans, outs = [*pairwise(offsets)], []
    for at, (lo, hi) in enumerate(spans):
        if lo == hi:
            continue
        path = [spans[each] for each in reversed(ancestors(at, parents or [-1] * len(spans)))]
        tokens = {name: torch.cat([t.narrow(dim, lo, hi - lo) for lo, hi in path], dim) for name, t in x.items()}
        out = run(tokens)
        outs.append(out.narrow(dim, out.shape[dim] - (hi - lo), hi - lo))
    return torch.cat(outs, dim)


def forest(length: int, draw: random.Random, most: int = 20) -> tuple[tuple[int, ...], list[int]]:
    """Offsets and parents of random segments, many of one or two tokens and one long."""
    segments = draw.randint(1, min(most, length))
    long = draw.randint(1, segments)
    cuts = [cut + (length - segments) * (cut >= long) for cut in range(1, segments)]
    if draw.random() < 0.5:
        cuts = sorted(draw.sample(range(1, length), segments - 1))
    return (0, *cuts, length), some_parents(segments, draw)


def with_empty(offsets: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    """The same offsets, with some segments of no tokens between."""
    return tuple(sorted((*offsets, *draw.choices(offsets, k=draw.randint(0, 3)))))


def recurrence(
    kind: str, length: int, *, seed: int, dtype: torch.dtype = torch.float64, packs: bool = False
) -> Recurrence:
    """Draw one; decays are strong enough to matter and weak enough to reach several ranks."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1 if packs else BATCH, length, *shape, generator=draw, dtype=torch.float64).to(dtype)

    keys = torch.nn.functional.normalize(normal(HEADS, KEYS), dim=-1)
    tokens = {"q": normal(HEADS, KEYS), "k": keys, "v": normal(HEADS, VALUES)}
    per_key = kind in ("gla", "mamba1", "kda")
    if kind == "mamba1":  # every channel is a head with one value
        tokens["v"] = normal(HEADS, 1)
    if kind != "delta":
        tokens["g"] = -0.3 * normal(HEADS, KEYS).abs() if per_key else -0.3 * normal(HEADS).abs()
    if kind in ("delta", "gated_delta", "kda"):
        tokens["beta"] = normal(HEADS).sigmoid()
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = delta_rule if "beta" in tokens else linear_attention
    return Recurrence(kind, tokens, Scan(run, "k", "v", packs=packs), torch.randn_like(tokens["v"]))


def convolve(weight: torch.Tensor) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]:
    """A causal depthwise convolution of (batch, tokens, channels), and a nonlinearity; weight (channels, width)."""

    def run(x: torch.Tensor, documents: tuple[int, ...] = ()) -> torch.Tensor:
        if documents:
            return torch.cat([run(x[:, lo:hi]) for lo, hi in pairwise(documents)], 1)
        padded = torch.nn.functional.pad(x.mT, (weight.shape[1] - 1, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=x.shape[2]).mT.tanh()

    return run
