"""Keep documents apart on one rank of Megatron-Core, whose own modules without Transformer Engine know none."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

ENDS: list[int] = []
"""Where the documents of the micro-batch end."""

_ROLLS = ("megatron.core.transformer.multi_token_prediction", "megatron.core.models.gpt.gpt_model")
"""Modules that call Megatron's roll_tensor."""


def hidden(tokens: int) -> torch.Tensor:
    """Return which pairs of tokens may not meet: of two documents, or a later one."""
    document = torch.bucketize(torch.arange(tokens), torch.tensor(ENDS), right=True)
    return torch.ne(document[:, None], document) | torch.ones(tokens, tokens).triu(1).bool()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Heed `ENDS` where a mask does not reach: in windows, latent attention, and predicted tokens."""
    from megatron.core.fusions import fused_softmax

    from tests.support.megatron_model import DenseAttention

    windows = fused_softmax.get_sliding_window_causal_mask
    changes: list[tuple[Any, str, Any]] = [
        (fused_softmax, "get_sliding_window_causal_mask", lambda *sizes: windows(*sizes) | hidden(sizes[1])),
        (DenseAttention, "forward", _dense),
    ]
    homes = map(importlib.import_module, _ROLLS)
    changes += [(home, "roll_tensor", _roll) for home in homes if hasattr(home, "roll_tensor")]
    kept = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, function in changes:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(changes, kept, strict=True):
            setattr(owner, name, function)


def _dense(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    scores = (q @ k.mT * (self.scale or query.shape[-1] ** -0.5)).masked_fill(hidden(len(key)), -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def _roll(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rolled = tensor.roll(-1, -1)
    rolled[..., [end - 1 for end in ENDS]] = 0
    return rolled, rolled.sum()
