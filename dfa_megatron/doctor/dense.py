"""Attention by its definition, dense and in float64: the ground truth."""

from __future__ import annotations

import math

import torch

from dfa_megatron.plan.language.geometry import FULL, Band
from dfa_megatron.plan.language.mask import Mask


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Band | Mask | torch.Tensor = FULL,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by its definition, in float64 and differentiable, with all scores in memory.

    Args:
        q: (batch, q_len, heads, head_dim); k, v: (batch, kv_len, kv_heads, head_dim), v's head_dim may differ.
        visible: the pairs that count: a band, a mask over all tokens, or bool that broadcasts to (batch, heads, q_len,
            kv_len).
        softmax_scale: default 1 / sqrt(head_dim).
        softcap: scores are softcap * tanh(scores / softcap), 0 for no cap.
        sinks: (heads,), one more score in every row of a head, of a token whose value is 0.

    Returns:
        out (batch, q_len, heads, head_dim of v) and lse (batch, heads, q_len), float64. A row that sees nothing has out
            0, lse -inf and gradient 0.
    """
    groups = q.shape[2] // k.shape[2]
    if groups * k.shape[2] != q.shape[2]:
        raise ValueError(f"kv_heads ({k.shape[2]}) must divide heads ({q.shape[2]})")
    k64, v64 = (t.double().repeat_interleave(groups, dim=2) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k64) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~pairs_of(visible, q.shape[1], k.shape[1]).to(q.device), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
        v64 = torch.cat([v64, v64.new_zeros(v64.shape[0], 1, *v64.shape[2:])], 1)
    peak = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), 0.0)
    weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    safe = total.masked_fill(total == 0, 1.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / safe, v64)
    return out, (safe.log() + peak).masked_fill(total == 0, -math.inf).squeeze(-1)


def band_of(causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Band:
    """Return the band of flash-attn's two arguments."""
    return Band(window_size[0], 0 if causal else window_size[1])


def band_mask(q_len: int, kv_len: int, band: Band) -> torch.Tensor:
    """Return the visible pairs (q_len, kv_len), bool: -left <= j - i - (kv_len - q_len) <= right, -1 for no bound."""
    ahead = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
    left, right = (max(q_len, kv_len) if bound < 0 else bound for bound in (band.left, band.right))
    return (ahead >= -left) & (ahead <= right)


def pairs_of(visible: Band | Mask | torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """Return the pairs that attend, (q_len, kv_len) of bool."""
    if isinstance(visible, Band):
        return band_mask(q_len, kv_len, visible)
    if isinstance(visible, torch.Tensor):
        return visible
    ahead = torch.arange(kv_len) - torch.arange(q_len)[:, None]
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for tile in visible.tiles:
        tile = tile.shift(0, -(visible.queries or 0))
        at = slice(tile.q.lo, tile.q.hi), slice(tile.kv.lo, tile.kv.hi)
        seen[at] |= (ahead[at] >= tile.lo) & (ahead[at] <= tile.hi)
    return seen
