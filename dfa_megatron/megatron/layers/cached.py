"""Attention of new tokens over a key cache, for evaluation on one context-parallel rank."""

from __future__ import annotations

import torch


def attend_over_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: tuple[int, int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return causal attention of the last rows of a sequence, with all scores in memory, in float32 or wider.

    Args:
        query: (rows, batch, heads, head_dim), the last of the sequence.
        key, value: (all rows, batch, kv_heads, head_dim or value_dim).
        scale: of the scores.
        window: tokens that a row sees to its left and right, -1 for no bound.
        sinks: a logit per head that takes part in the softmax and has no value, or None.

    Returns:
        (rows, batch, heads * value_dim) in the query's dtype.
    """
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3).to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    rows, columns = scores.shape[-2:]
    behind = torch.arange(columns - rows, columns, device=q.device)[:, None] - torch.arange(columns, device=q.device)
    hidden = behind < 0 if window[0] < 0 else (behind < 0) | (behind > window[0])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], rows, 1)], -1)
    weights = scores.softmax(-1)[..., :columns]
    return (weights @ v.repeat_interleave(groups, 1)).permute(2, 0, 1, 3).flatten(2).to(query.dtype)
