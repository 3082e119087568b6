"""Learned-sparse attention of one process, written for itself: dense matrices, Python's sort, autograd, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


def visible(length: int, offsets: Sequence[int]) -> torch.Tensor:
    """Return which tokens see which, bool (length, length): causal within each document."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for lo, hi in pairwise(offsets):
        seen |= (i >= lo) & (i < hi) & (j >= lo) & (j <= i)
    return seen


def scores(index_q: torch.Tensor, index_k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return (length, length) from (length, heads, dim), (length, dim), (length, heads)."""
    products = torch.einsum("ihd,jd->hij", index_q, index_k)
    return torch.einsum("ih,hij->ij", weights, products.relu())


def choice(found: torch.Tensor, seen: torch.Tensor, topk: int) -> list[list[int]]:
    """Return for each query the keys that it chooses: the highest score first, among equals the lowest position."""
    rows = []
    for row, sees in zip(found.tolist(), seen.tolist(), strict=True):
        keys = [key for key in range(len(row)) if sees[key]]
        rows.append(sorted(keys, key=lambda key: (-row[key], key))[:topk])
    return rows


@dataclass
class Attention:
    """out (length, heads, dim_v), lse (heads, length), probabilities (heads, length, length), the sinks' left out."""

    out: torch.Tensor
    lse: torch.Tensor
    probabilities: torch.Tensor


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reads: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> Attention:
    """Return attention of (length, heads, dim) over the pairs that are read, bool (length, length)."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("ihd,jhd->hij", q, keys) * scale
    logits = logits.masked_fill(~reads, -math.inf)
    if sinks is not None:
        logits = torch.cat([sinks[:, None, None].expand(-1, len(q), 1), logits], 2)
    lse = logits.logsumexp(2)
    some = lse > -math.inf
    p = torch.where(some[..., None], (logits - lse.masked_fill(~some, 0.0)[..., None]).exp(), 0.0)
    p = p[..., -len(q) :]
    return Attention(torch.einsum("hij,jhd->ihd", p, values), lse, p)


def loss_rows(found: torch.Tensor, reads: torch.Tensor, probabilities: torch.Tensor) -> list[torch.Tensor]:
    """Return the divergence of each query that reads a key: of the indexer's softmax from attention's probabilities."""
    rows = []
    for score, read, p in zip(found, reads, probabilities.detach().sum(0), strict=True):
        if read.any():
            teacher = p[read] / p[read].sum()
            student = torch.softmax(score[read], 0)
            rows.append((teacher * (teacher.clamp(min=1e-300) / student).log()).sum())
    return rows
