"""Which tokens of a generation each rank holds: its part of the prompt, and of later tokens each rank one in turn.

Every rank computes this alike, so nothing is sent to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Sight(NamedTuple):
    """How far a layer's tokens see: `size` tokens, itself among them, or the tokens of its chunk; None for all."""

    size: int | None = None
    chunked: bool = False


@dataclass(slots=True)
class Progress:
    """Hold what all layers of a cache share.

    rank, ranks: of the group. gather: returns every rank's tensor; collective.
    starts: the first token of each row behind its padding, in a sequence whose length the ranks divide.
    local: this rank's tokens of the prefill, as many as every other rank's.
    total: tokens of a row, with those of the forward that runs. before: as many before this forward, 0 in the prefill.
    added: tokens before each row that only make its length divide.
    """

    rank: int
    ranks: int
    gather: Callable[[torch.Tensor], list[torch.Tensor]]
    starts: tuple[int, ...] = ()
    local: int = 0
    total: int = 0
    before: int = 0
    added: int = 0

    @property
    def takes(self) -> bool:
        """Return whether this rank keeps the token of this step."""
        return (self.total - 1 - self.local * self.ranks) % self.ranks == self.rank

    def slots(self, device: torch.device) -> torch.Tensor:
        """Return the place of each of this rank's tokens of the prefill in a row with its padding, (1, local)."""
        return torch.arange(self.local, device=device)[None].add(self.rank * self.local - self.added).clamp(min=0)

    def first_seen(self, sight: Sight) -> list[int]:
        """Return the first token that the token of this step sees, or the one after the prefill, for each row."""
        token = self.total - 1 if self.before else self.total
        if sight.size is None:
            return list(self.starts)
        if sight.chunked:
            return [at + (token - at) // sight.size * sight.size for at in self.starts]
        return [max(at, token - sight.size + 1) for at in self.starts]

    def held(self, sight: Sight) -> int:
        """Return how many of this rank's tokens a layer keeps: those that some row sees now or later."""
        return self._held_from(min(self.first_seen(sight)))

    def hidden(self, kept: Sight, sight: Sight) -> tuple[int, ...]:
        """Return how many of the tokens kept for one sight lie before what another one sees, for each row."""
        return tuple(self.held(kept) - self._held_from(lo) for lo in self.first_seen(sight))

    def _held_from(self, lo: int) -> int:
        """Return this rank's tokens from a token on."""
        prompt = self.local * self.ranks
        of_prompt = self.local - min(max(lo - self.rank * self.local, 0), self.local)
        taken = range(prompt + self.rank, self.total, self.ranks)
        return of_prompt + len(taken) - len(range(prompt + self.rank, min(lo, self.total), self.ranks))
