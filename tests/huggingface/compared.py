"""Compare what ranks that share a batch have computed with what one process has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.sharding import shard_sequence
from tests.support.close import assert_close
from tests.support.models import gradients


def assert_loss(loss: torch.Tensor, want: torch.Tensor, name: str, tolerance: float = 1e-5) -> None:
    """Every rank has the loss of the whole batch."""
    assert_close(loss.detach(), want, tolerance=tolerance, name=f"{name} loss")


def summed(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all ranks."""
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return found


def assert_gradients(model: Any, wanted: Mapping[str, torch.Tensor], name: str, tolerance: float = 1e-5) -> None:
    """The mean of the ranks' gradients is that of one process, for every parameter."""
    found = summed(model)
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        assert_close(found[key] / dist.get_world_size(), want, tolerance=tolerance, name=f"{name} {key}")


def check(model: Any, batch: dict[str, torch.Tensor], reference: Any, want: Any, name: str) -> None:
    """Logits, loss and gradients of a batch are those of `reference`, whose backward has run.

    `want` has its logits and its loss.
    """
    model.zero_grad()
    got = model(**batch)
    got.loss.backward()
    assert_close(got.logits, shard_sequence(want[0]), tolerance=1e-5, name=f"{name} logits")
    assert_loss(got.loss, want[1], name)
    assert_gradients(model, gradients(reference), name)
