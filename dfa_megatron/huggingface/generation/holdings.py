"""Which tokens of a generation each rank holds. Every rank computes this alike, so nothing is sent to find it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
    total: tokens of a row, with those of the forward that runs. before: as many before this forward, 0 in the prefill.
    added: tokens before each row that only make its length divide.
    """

    rank: int
    ranks: int
    gather: Callable[[torch.Tensor], list[torch.Tensor]]
    starts: tuple[int, ...] = ()
    total: int = 0
    before: int = 0
    added: int = 0

    @property
    def local(self) -> int:
        """Return this rank's tokens of the prefill."""
        return self.total // self.ranks

    def slots(self, device: torch.device) -> torch.Tensor:
        """Return the place of each of this rank's tokens of the prefill in a row with its padding, (1, local)."""
        return torch.arange(self.local, device=device)[None].add(self.rank * self.local - self.added).clamp(min=0)

    def first_seen(self, sight: Sight, token: int) -> list[int]:
        """Return the first token that a token sees, for each row."""
        if sight.size is None:
            return list(self.starts)
        if sight.chunked:
            return [at + (token - at) // sight.size * sight.size for at in self.starts]
        return [max(at, token - sight.size + 1) for at in self.starts]


@dataclass(slots=True)
class Holdings:
    """Hold the tokens of every rank, as spans, in the layers of one sight.

    kept: this rank's slots of the prefill that stay. dropped: slots at its front that the last step gave up.
    owner: the rank that takes the token of this step.
    """

    progress: Progress
    sight: Sight
    spans: list[deque[tuple[int, int]]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    kept: slice = field(default_factory=lambda: slice(0))
    dropped: int = 0
    owner: int = -1

    def prefill(self) -> None:
        """Place the tokens of the prefill where they are computed; those that no later token sees are not kept."""
        local = self.progress.local
        lo = min(self.progress.first_seen(self.sight, self.progress.total))
        edges = [(max(lo, rank * local), (rank + 1) * local) for rank in range(self.progress.ranks)]
        self.spans = [deque([edge] if edge[0] < edge[1] else []) for edge in edges]
        self.counts = [sum(hi - lo for lo, hi in spans) for spans in self.spans]
        self.kept = slice(local - self.counts[self.progress.rank], local)

    def step(self) -> None:
        """Place one more token, at the rank with the fewest, and drop those that no token sees any more."""
        token = self.progress.total - 1
        lo = min(self.progress.first_seen(self.sight, token))
        before = self.counts[self.progress.rank]
        for rank, spans in enumerate(self.spans):
            while spans and spans[0][0] < lo:
                first, last = spans.popleft()
                if last > lo:
                    spans.appendleft((lo, last))
                self.counts[rank] -= min(last, lo) - first
        self.dropped = before - self.counts[self.progress.rank]
        self.owner = self.counts.index(min(self.counts))
        self.counts[self.owner] += 1
        self.spans[self.owner].append((token, token + 1))

    def starts(self, sight: Sight) -> tuple[int, ...]:
        """Return the first of this rank's slots that the newest token sees, for each row."""
        spans = self.spans[self.progress.rank]
        found = []
        for lo in self.progress.first_seen(sight, self.progress.total - 1):
            hidden = 0
            for first, last in spans:
                if first >= lo:
                    break
                hidden += min(last, lo) - first
            found.append(hidden)
        return tuple(found)
