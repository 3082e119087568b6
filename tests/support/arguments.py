"""Build the public functions' arguments from flat options, for tests and tools that combine options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import DistAttentionError, UnsupportedError

_OPTIONS = frozenset(spec.name for spec in fields(DistAttentionConfig))


def arguments(**flat: Any) -> dict[str, Any]:
    """Return keywords of the functions, or of `Request`: options of the config are collected in `config`.

    Attention is causal unless a mask, a plan or `causal` says otherwise.
    """
    if not {"causal", "mask", "plan"} & flat.keys():
        flat["causal"] = True
    config = DistAttentionConfig(**{name: value for name, value in flat.items() if name in _OPTIONS})
    return {name: value for name, value in flat.items() if name not in _OPTIONS} | {"config": config}


def tensors(
    local: int = 8, gradients: str = "qkv", *, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return a rank's q, k and v; those named need a gradient."""
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return [torch.randn(1, local, h, 16).to(dtype).requires_grad_(x in gradients) for x, h in sizes.items()]


def told(action: Callable[[], object]) -> str:
    """Return the name and the text of the error that an action ends with, or nothing."""
    try:
        action()
    except (DistAttentionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_refused(said: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Assert that a call is refused in words that a pattern matches."""
    with pytest.raises(UnsupportedError, match=said):
        function(*args, **kwargs)
