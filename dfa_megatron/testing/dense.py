"""Compute dense attention in float64 as ground truth, and compare with it so that NaN never passes."""

from __future__ import annotations

import math

import torch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    visible: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by its definition, in float64 and differentiable, with all scores in memory.

    Args:
        q: (batch, q_len, heads, head_dim); k, v: (batch, kv_len, kv_heads, head_dim), v's head_dim may differ.
        causal, window_size: as in flash-attn, aligned to the bottom right where the lengths differ.
        visible: bool, broadcastable to (batch, heads, q_len, kv_len): a further mask of the visible pairs.
        softmax_scale: default 1 / sqrt(head_dim).
        softcap: scores are softcap * tanh(scores / softcap), 0 for no cap.
        bias: added to the (capped) scores, broadcastable to (batch, heads, q_len, kv_len).
        sinks: (heads,), one more score in every row of a head, of a token whose value is 0.

    Returns:
        out (batch, q_len, heads, head_dim of v) and lse (batch, heads, q_len), float64. A row that sees nothing has out
            0, lse -inf and gradient 0.
    """
    groups = q.shape[2] // k.shape[2]
    if groups * k.shape[2] != q.shape[2]:
        raise ValueError(f"kv_heads ({k.shape[2]}) must divide heads ({q.shape[2]})")
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    q64 = q.double()
    k64, v64 = (t.double().repeat_interleave(groups, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q64, k64) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    mask = band_mask(q.shape[1], k.shape[1], causal=causal, window_size=window_size, device=q.device)
    if visible is not None:
        mask = mask & visible
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        rows = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        nothing = v64.new_zeros(v64.shape[0], 1, *v64.shape[2:])
        scores, v64 = torch.cat([scores, rows], -1), torch.cat([v64, nothing], 1)
    columns = scores.shape[-1]
    peak = scores.detach().amax(-1, keepdim=True) if columns else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / safe, v64)
    lse = (safe.log() + peak.masked_fill(empty, 0.0)).masked_fill(empty, -math.inf)
    return out, lse.squeeze(-1)


def band_mask(
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the visible pairs (q_len, kv_len), bool: -left <= j - i - (kv_len - q_len) <= right, -1 for no bound."""
    left, right = window_size
    if causal:
        right = 0
    rows = torch.arange(q_len, device=device)[:, None]
    columns = torch.arange(kv_len, device=device)[None, :]
    diagonal = columns - rows - (kv_len - q_len)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= diagonal >= -left
    if right >= 0:
        mask &= diagonal <= right
    return mask


def assert_close(got: torch.Tensor, want: torch.Tensor, *, tolerance: float, name: str = "tensor") -> None:
    """Assert that |got - want| / |want| (Frobenius norms, in float64) is at most `tolerance`.

    Infinities must be in the same places and are left out of the norms; where |want| is 0, |got| itself is compared.
    NaN on either side never passes.

    Raises:
        AssertionError: with the distance and the element that is farthest off.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}")
    a, b = got.detach().double().cpu(), want.detach().double().cpu()
    for side, values in (("", a), ("the wanted ", b)):
        if values.isnan().any():
            raise AssertionError(f"{name}: {side}value at {_place(values.isnan())} is NaN")
    different = (a != b) & (a.isinf() | b.isinf())
    if different.any():
        place = _place(different)
        raise AssertionError(f"{name}: {a[place].item()} at {place}, wanted {b[place].item()}")
    finite = b.isfinite()
    error = torch.where(finite, a - b, 0.0)
    norm = torch.where(finite, b, 0.0).norm().item()
    distance = error.norm().item() / (norm or 1.0)
    if not distance <= tolerance:
        place = _place(error.abs() == error.abs().max())
        raise AssertionError(
            f"{name}: relative distance {distance:.3e} is above {tolerance:.1e}; farthest off at {place}: "
            f"{a[place].item():.9g}, wanted {b[place].item():.9g}"
        )


def _place(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the first index at which the mask is true."""
    return tuple(int(index) for index in mask.nonzero()[0])
