"""The arena: one flat receive buffer per run, and what is made of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class Arena:
    """Flat memory that receives messages, and what its users made of it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._kept: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> Arena:
        """Allocate that many bytes with PyTorch's allocator."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def kept(self, owner: object, make: Callable[[torch.Tensor], Made]) -> Made:
        """Return what `make` makes of this memory, once for each owner. It ends with the owner or the arena."""
        if owner not in self._kept:
            self._kept[owner] = make(self.flat)
        made: Made = self._kept[owner]
        return made
