"""Record a rank's results: named pieces of tensors with their places in the whole, in the order of computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tensor of the model.

    Attributes:
        section: the part of the run, as in `Case.sections`.
        kind: the row of the table that it counts in: "gradients of q, k, v".
        name: of the whole tensor, the same on every rank that holds a part: "layer 3 q".
        values: this rank's part, on CPU.
        places: for each dimension that is cut, the global indices of this rank's entries. Other dimensions are whole.
        axes: names of the dimensions, for messages: ("token", "sample", "head", "channel").
        least: differences are compared with the largest entry of the whole tensor, or with this if it is larger. It is
            for tensors that would be 0 but for rounding, as the gradient of a bias that all keys have.
    """

    section: str
    kind: str
    name: str
    values: torch.Tensor
    places: dict[int, torch.Tensor]
    axes: tuple[str, ...]
    least: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Return the name under which it is compared inside its section."""
        return self.kind, self.name


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that one rank recorded."""

    rank: int
    pieces: tuple[Piece, ...]
    facts: Mapping[str, str]


class Recorder:
    """Takes what a rank computes; one for each rank process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.section = ""
        self._pieces: dict[tuple[str, str, str], Piece] = {}
        self._facts: dict[str, str] = {}

    def add(
        self,
        kind: str,
        name: str,
        values: torch.Tensor,
        axes: tuple[str, ...] = (),
        places: Mapping[int, torch.Tensor] | None = None,
        least: float = 0.0,
    ) -> None:
        """Record a part of a tensor in the section that runs (`self.section`); the latest of a name counts."""
        held = values.detach().cpu().clone()
        key = (self.section, kind, name)
        self._pieces.pop(key, None)
        self._pieces[key] = Piece(self.section, kind, name, held, dict(places or {}), axes, least)

    def fact(self, name: str, value: str) -> None:
        """Record something beside tensors that must be as the case expects it."""
        self._facts[name] = value

    def save(self, path: Path) -> None:
        """Write everything, so that `load` reads it without unpickling objects."""
        pieces = [asdict(piece) for piece in self._pieces.values()]
        torch.save({"rank": self.rank, "facts": self._facts, "pieces": pieces}, path)


def load(path: Path) -> Recording:
    """Read a file that `Recorder.save` wrote."""
    stored: dict[str, Any] = torch.load(path, weights_only=True)
    pieces = (Piece(**{**piece, "axes": tuple(piece["axes"])}) for piece in stored["pieces"])
    return Recording(stored["rank"], tuple(pieces), stored["facts"])
