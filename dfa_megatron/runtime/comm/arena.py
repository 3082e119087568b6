"""Flat memory in which messages land, and the tensors in it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Protocol

import torch

Landing = dict[str, tuple[torch.Tensor, ...]]
"""The tensors of a received message, by name."""


class Place(Protocol):
    """Where a tensor lies in flat memory."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, in a flat tensor of bytes."""
        ...


class Landings(Protocol):
    """A plan of memory. landings: buffer -> where its tensors lie in the arena, by name."""

    @property
    def landings(self) -> Mapping[int, Mapping[str, tuple[Place, ...]]]:
        """By the number of the buffer."""
        ...


class Arena:
    """Flat memory in which messages land, and the tensors in it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._tensors: weakref.WeakKeyDictionary[Landings, dict[int, Landing]] = weakref.WeakKeyDictionary()

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> Arena:
        """That many bytes from PyTorch's allocator."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def tensors(self, memory: Landings) -> dict[int, Landing]:
        """The tensors of every buffer that lands here, by name; made once for as long as the plan is kept."""
        if memory not in self._tensors:
            self._tensors[memory] = {
                number: {name: tuple(place.view(self.flat) for place in placed) for name, placed in landing.items()}
                for number, landing in memory.landings.items()
            }
        return self._tensors[memory]
