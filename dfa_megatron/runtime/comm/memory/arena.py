"""The arena: one flat receive buffer per run, and the tensors in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

Landing = dict[str, tuple[torch.Tensor, ...]]
"""The tensors of a received message, by name."""

Made = TypeVar("Made")


class Place(Protocol):
    """Where a tensor lies in flat memory."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of a flat tensor of bytes."""
        ...


class Landings(Protocol):
    """A memory plan, as far as the arena reads it."""

    @property
    def landings(self) -> Mapping[int, Mapping[str, tuple[Place, ...]]]:
        """Map each buffer to the places of its tensors in the arena, by name."""
        ...


class Arena:
    """Flat memory that receives messages, and what its users made of it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._kept: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> Arena:
        """Allocate that many bytes with PyTorch's allocator."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def tensors(self, memory: Landings) -> dict[int, Landing]:
        """Return the tensors of every received buffer, by name; built once per memory plan."""
        return self.kept(memory, lambda flat: _landed(memory, flat))

    def kept(self, owner: object, make: Callable[[torch.Tensor], Made]) -> Made:
        """Return what `make` makes of this memory, once for each owner. It ends with the owner or the arena."""
        if owner not in self._kept:
            self._kept[owner] = make(self.flat)
        made: Made = self._kept[owner]
        return made


def _landed(memory: Landings, flat: torch.Tensor) -> dict[int, Landing]:
    return {
        number: {name: tuple(place.view(flat) for place in placed) for name, placed in landing.items()}
        for number, landing in memory.landings.items()
    }
