"""Compare what ranks that share a batch have computed with what one process has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.current_forward import CONTEXT, Forward, enter, leave
from dfa_megatron.layouts import contiguous
from tests.support.close import assert_close
from tests.support.models import gradients

Gradients = Mapping[str, torch.Tensor]


@contextmanager
def called(layer: torch.nn.Module, tokens: int) -> Iterator[None]:
    """A layer's model is called on one rank with so many tokens."""
    enter(layer, Forward(getattr(layer, CONTEXT), distributed=True, layout=contiguous(tokens, 1)))
    try:
        yield
    finally:
        leave(layer)


def assert_same(found: Gradients, wanted: Gradients, name: str, tolerance: float) -> None:
    """Two models have the same gradients, for every parameter."""
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        assert_close(found[key], want, tolerance=tolerance, name=f"{name} {key}")


def assert_loss(loss: torch.Tensor, want: torch.Tensor, name: str, tolerance: float = 1e-5) -> None:
    """Every rank has the loss of the whole batch."""
    assert_close(loss.detach(), want, tolerance=tolerance, name=f"{name} loss")


def summed(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all ranks."""
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return found


def assert_gradients(model: Any, wanted: Gradients, name: str, tolerance: float = 1e-5) -> None:
    """The mean of the ranks' gradients is that of one process, for every parameter."""
    found = {key: gradient / dist.get_world_size() for key, gradient in summed(model).items()}
    assert_same(found, wanted, name, tolerance)
