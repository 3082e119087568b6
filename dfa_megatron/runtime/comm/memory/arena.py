"""The arena: one flat receive buffer per run, and the tensors in it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

Landing = dict[str, tuple[torch.Tensor, ...]]
"""The tensors of a received message, by name."""


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
    """Flat memory that receives messages, and the tensors in it.

    registers: those of a bound program, with its views of this memory.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._tensors: weakref.WeakKeyDictionary[Landings, dict[int, Landing]] = weakref.WeakKeyDictionary()
        self.registers: weakref.WeakKeyDictionary[object, list[Any]] = weakref.WeakKeyDictionary()

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> Arena:
        """Allocate that many bytes with PyTorch's allocator."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def tensors(self, memory: Landings) -> dict[int, Landing]:
        """Return the tensors of every received buffer, by name; built once per memory plan."""
        if memory not in self._tensors:
            self._tensors[memory] = {
                number: {name: tuple(place.view(self.flat) for place in placed) for name, placed in landing.items()}
                for number, landing in memory.landings.items()
            }
        return self._tensors[memory]
