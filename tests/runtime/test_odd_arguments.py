"""What is no tensor, no group, no mask, or no plain call is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import masks
from dfa_megatron.errors import UnsupportedError


def tensors(rows: int = 8, heads: int = 2, dim: int = 8, dim_v: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(1, rows, heads, d, generator=generator, requires_grad=True) for d in (dim, dim, dim_v)]


def attend(*qkv: Any, **options: Any) -> torch.Tensor:
    out = dfa_megatron.dist_flash_attn_func(*qkv, **{"causal": True} | options)
    assert isinstance(out, torch.Tensor)
    return out


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a number as group": (lambda: attend(*tensors(), group=0), "group=0"),
    "ranks as group": (lambda: attend(*tensors(), group=[0, 1]), r"group=\[0, 1\]"),
    "sinks in a list": (lambda: attend(*tensors(), sinks=[0.0, 0.0]), "sinks of type list"),
    "slopes in a list": (lambda: attend(*tensors(), alibi_slopes=[0.5, 0.25]), "alibi_slopes of type list"),
    "an array": (lambda: attend(tensors()[0].detach().numpy(), *tensors()[1:]), "q of type ndarray"),
    "no offsets": (
        lambda: dfa_megatron.dist_flash_attn_varlen_func(*(x[0] for x in tensors()), None, causal=True),
        "cu_seqlens",
    ),
    "a mask without a pair": (
        lambda: attend(*tensors(), causal=None, mask=masks.union("none", 8, [])),
        "no token attends to any",
    ),
    "gradients of a batch": (lambda: _many_gradients(), "is_grads_batched"),
    "torch.func": (lambda: torch.func.grad(lambda q: attend(q, *tensors()[1:]).sum())(tensors()[0]), "torch.func"),
}  # fmt: skip


def _many_gradients() -> None:
    q, k, v = tensors()
    out = attend(q, k, v)
    torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("what", REFUSED)
def test_an_odd_argument_is_refused_in_words(what: str) -> None:
    action, match = REFUSED[what]
    with pytest.raises(UnsupportedError, match=match):
        action()
