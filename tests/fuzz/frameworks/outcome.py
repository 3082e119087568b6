"""What became of a draw, and how far its numbers are from one rank's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

LIMITS = {"float64": 4e-6, "float64 beside float32": 5e-5, "float32": 1e-4}
"""Of a gradient's largest entry, by what a draw computes in. Frameworks make some parts in float32: Megatron its loss
and rotary tables; transformers its norms, softmax and states, too."""
LEAST = 0.03
"""Gradients smaller than this share of the model's largest are compared with it: some are 0 but for rounding."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the outcome of a draw, on one rank or in all.

    kind: "right", "refused", "wrong", "failed" or "hung". reason: of a refusal, or what is wrong. worst: the largest
    difference as a share of the limit.
    """

    number: int
    kind: str
    reason: str = ""
    worst: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(slots=True)
class Found:
    """Hold what a step came to: the mean loss, None on ranks that have none, and named gradients."""

    loss: float | None
    gradients: dict[str, torch.Tensor]
    places: dict[str, Mapping[int, torch.Tensor]]
    """Where each gradient is in the whole one: indices by dimension; empty if it is whole."""


class Draw(Protocol):
    """A random step of a framework."""

    @property
    def number(self) -> int:
        """The number that it was drawn with."""

    @property
    def ranks(self) -> int:
        """How many ranks run it."""

    @property
    def dtype(self) -> str:
        """What it computes in: one of `LIMITS`."""

    @property
    def line(self) -> str:
        """The command that runs it again."""

    @property
    def start(self) -> tuple[Any, ...]:
        """What its groups of ranks depend on: draws of the same are run one after another."""

    def features(self) -> Iterable[str]:
        """Return the names of the features that a run counts."""


def judge(draw: Draw, found: Found, want: Mapping[str, Any]) -> Outcome:
    """Compare with one rank's loss and gradients."""
    limit = LIMITS[draw.dtype]
    shares = {name: share / limit for name, share in _distances(found, want).items()}
    worst = max(shares.values(), default=0.0)
    if worst <= 1:
        return Outcome(draw.number, "right", worst=worst)
    off = [f"{name} {share * limit:.1e}" for name, share in sorted(shares.items(), key=lambda x: -x[1]) if share > 1]
    return Outcome(draw.number, "wrong", f"{len(off)} of {len(shares)} differ: {', '.join(off[:6])}", worst)


def _distances(found: Found, want: Mapping[str, Any]) -> dict[str, float]:
    shares = {}
    if found.loss is not None:
        shares["loss"] = _far(abs(found.loss - want["loss"]) / max(abs(want["loss"]), 1e-30))
    largest = max((float(x.abs().max()) for x in want["gradients"].values()), default=0.0)
    for name, gradient in found.gradients.items():
        whole = want["gradients"][name]
        least = max(float(whole.abs().max()), LEAST * largest, 1e-30)
        for dimension, held in found.places.get(name, {}).items():
            whole = whole.index_select(dimension, held)
        shares[name] = _far(float((gradient.double() - whole.double()).abs().max()) / least)
    return shares


def _far(share: float) -> float:
    return share if share < float("inf") else 1e9
