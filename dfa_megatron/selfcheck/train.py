"""Train a small model on a rank and record it; a framework says how its model is run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dfa_megatron.selfcheck.record import Recorder

STEPS = 3
ADAM_EPS = 1e-2
"""Adam divides by its eps where a gradient is small. This one keeps rounding errors small there."""
LEAST_STEP = 0.2
"""Smaller changes than this part of Adam's learning rate are compared with it: weights near 1 are rounded."""

Parameters = Callable[[], Iterator[tuple[str, torch.Tensor, Mapping[int, torch.Tensor]]]]
"""Yields each parameter's global name, its values on this rank, and their places as in `Piece`."""


def noise(name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return random numbers that depend on a parameter's name alone, so that every rank can make the same ones."""
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record_steps(
    recorder: Recorder,
    parameters: Parameters,
    step: Callable[[int], Any],
    *,
    least: float = 0.0,
    whole: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run three steps of an optimizer, and record how far parameters have come after each.

    `step` records its loss and returns the norm of the gradient, or None. `least` is as in `Piece`. `whole` is a
    context that gathers parameters which a framework shards.
    """
    with whole():
        initial = {name: values.detach().clone() for name, values, _ in parameters()}
    for number in range(1, STEPS + 1):
        norm = step(number)
        if norm is not None:
            recorder.add("norm of the gradient", f"step {number}", torch.as_tensor(norm))
        with whole():
            for name, values, places in parameters():
                change = values.detach() - initial[name]
                recorder.add("change of parameters", f"step {number} {name}", change, (), places, least)


def record_attention(
    recorder: Recorder,
    layer: str,
    inputs: Mapping[str, torch.Tensor],
    axes: tuple[str, ...],
    places: Callable[[torch.Tensor], Mapping[int, torch.Tensor]],
    scale: float,
) -> None:
    """Record q, k and v of an attention, and `scale` times their gradients; axes and places are as in `Piece`."""
    for name, x in inputs.items():
        at = places(x)
        recorder.add("q, k, v", f"{layer} {name}", x, axes, at)
        if x.requires_grad:

            def take(gradient: torch.Tensor, name: str = f"{layer} d{name}", at: Any = at) -> None:
                recorder.add("gradients of q, k, v", name, gradient * scale, axes, at)

            x.register_hook(take)
