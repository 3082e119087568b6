"""Keep documents apart on one rank of Megatron-Core, whose own modules without Transformer Engine know none."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

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
    """Heed `ENDS` where a mask does not reach: in windows, and predicted tokens."""
    from megatron.core.fusions import fused_softmax

    windows = fused_softmax.get_sliding_window_causal_mask

    def mask(*sizes: int) -> torch.Tensor:
        return windows(*sizes) | hidden(sizes[1])  # type: ignore[no-any-return]

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(fused_softmax, "get_sliding_window_causal_mask", mask))
        for home in map(importlib.import_module, _ROLLS):
            if hasattr(home, "roll_tensor"):
                stack.enter_context(patch.object(home, "roll_tensor", _roll))
        yield


def _roll(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rolled = tensor.roll(-1, -1)
    rolled[..., [end - 1 for end in ENDS]] = 0
    return rolled, rolled.sum()
