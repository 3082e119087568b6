"""Ranks equal one process: their mean loss, the losses of their tokens and their gradients, of any framework."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.workers import run_ranks

LEAST = 0.03
"""Gradients smaller than this share of the model's largest are compared with it: some are 0 but for rounding."""
NORM = "norm of all gradients"
"""The name of it, where an optimizer leaves nothing else."""


@dataclass(slots=True)
class Found:
    """Hold what a step came to: the mean loss, None on ranks that have none, and named gradients."""

    loss: float | None
    gradients: dict[str, torch.Tensor]
    places: dict[str, Mapping[int, torch.Tensor]]
    """Where each gradient is in the whole one: indices by dimension; empty if it is whole."""
    tokens: dict[int, float] = field(default_factory=dict)
    """The losses of this rank's tokens, by their numbers in the global batch, where a framework tells them."""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """What else is compared, each by its own largest entry, with its places."""

    def whole(self) -> dict[str, Any]:
        """Return what one process is compared by."""
        return {"loss": self.loss, "gradients": self.gradients, "tokens": self.tokens, "outputs": self.outputs}


def distances(found: Found, want: Mapping[str, Any]) -> dict[str, float]:
    """Return how far each gradient and loss is from one process's, as a share of the largest entry."""
    shares = {}
    if found.loss is not None:
        shares["loss"] = _far(abs(found.loss - want["loss"]) / max(abs(want["loss"]), 1e-30))
    if found.tokens:
        most = max(abs(want["tokens"][at]) for at in found.tokens)
        shares["losses"] = _far(max(abs(loss - want["tokens"][at]) for at, loss in found.tokens.items()) / most)
    wholes = want["gradients"]
    largest = max((float(x.abs().max()) for x in wholes.values()), default=0.0)
    for name, gradient in found.gradients.items():
        whole = torch.cat([x.flatten() for x in wholes.values()]).norm() if name == NORM else wholes[name]
        least = max(float(whole.abs().max()), LEAST * largest, 1e-9) if largest > 1e-8 else 1.0  # all below is rounding
        shares[name] = _apart(found, name, gradient, whole) / least
    for name, output in found.outputs.items():
        whole = want["outputs"][name]
        shares[name] = _apart(found, name, output, whole) / max(float(whole.abs().max()), 1e-9)
    return shares


def _apart(found: Found, name: str, held: torch.Tensor, whole: torch.Tensor) -> float:
    for dimension, places in found.places.get(name, {}).items():
        whole = whole.index_select(dimension, places)
    return _far(float((held.double() - whole.double()).abs().max())) if held.numel() else 0.0


def _far(share: float) -> float:
    return share if share < float("inf") else 1e9


def check(step: Callable[[Any], Found], draws: Iterable[Any], *, cuda: bool = False) -> None:
    """Assert that every draw's ranks come to what `draw.alone()` comes to, which is run once for all draws of it.

    Args:
        step: runs a draw on this rank of its processes.
        cuda: run the ranks on GPUs, and one process on the CPU still.
    """
    some = sorted(draws, key=lambda draw: (draw.ranks, draw.start))
    with tempfile.TemporaryDirectory(prefix="alone-") as folder:
        with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""} if cuda else {}):
            run_ranks(1, _run_alone, step, some, folder, timeout=170)
        for ranks, group in groupby(some, key=lambda draw: draw.ranks):
            run_ranks(ranks, _compare, step, list(group), folder, timeout=300, cuda=cuda)


def _run_alone(rank: int, ranks: int, step: Callable[[Any], Found], draws: Sequence[Any], folder: str) -> None:
    known: dict[str, str] = {}
    for number, draw in enumerate(draws):
        alone = draw.alone()
        if repr(alone) not in known:
            known[repr(alone)] = f"{folder}/{number}.pt"
            torch.save(step(alone).whole(), known[repr(alone)])
    torch.save(known, f"{folder}/known.pt")


def _compare(rank: int, ranks: int, step: Callable[[Any], Found], draws: Sequence[Any], folder: str) -> None:
    known = torch.load(f"{folder}/known.pt")
    for draw in draws:
        assert_alike(step(draw), torch.load(known[repr(draw.alone())]), draw)
        dist.barrier()


def assert_alike(found: Found, want: Mapping[str, Any], draw: Any) -> None:
    """Assert that what this rank found is what one process wants."""
    assert found.gradients or found.tokens, f"{draw.line}: nothing was compared"
    limit = draw.limit
    off = {name: share for name, share in distances(found, want).items() if share > limit}
    worst = sorted(off.items(), key=lambda item: -item[1])[:6]
    assert not off, f"{draw.line}: {len(off)} differ: {', '.join(f'{name} {share:.1e}' for name, share in worst)}"


def gradients_of(model: Any, *groups: Any) -> dict[str, torch.Tensor]:
    """Return a model's gradients, summed over these groups of ranks."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values():
        for group in groups:
            dist.all_reduce(gradient, group=group)
    return found


def assert_gradients(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], where: Any = "") -> None:
    """Assert that named gradients are off by no more than 1e-5 of each one's largest entry."""
    assert found.keys() == want.keys(), where
    for name, gradient in want.items():
        error = float((found[name] - gradient).abs().max() / gradient.abs().max())
        assert error <= 1e-5, f"{where}: the gradient of {name} is off by {error:.2e}"
