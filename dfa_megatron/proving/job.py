"""What a framework says of its model, and the texts that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

IGNORED = -100
"""The label of a token without loss."""

TOKENS = 48
"""The fewest tokens of a rank: few, so that one wrong label at a rank's border shows in every gradient."""

LONGEST = 2048
"""The most tokens that a window is worth."""


@dataclass(frozen=True, slots=True)
class Text:
    """Random tokens in documents of one length, which need no padding where each is a row of its own.

    name: for the table.
    ids: int64 (tokens).
    labels: int64 (tokens), of each token itself; the first of a document, a prompt and random holes have none.
    documents: how many there are. A rank's border never lies between two of several.
    """

    name: str
    ids: torch.Tensor
    labels: torch.Tensor
    documents: int = 1

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return (documents, tokens of one) of (tokens)."""
        return x.view(self.documents, -1)

    @property
    def targets(self) -> torch.Tensor:
        """The label of the next token in the same document, (tokens)."""
        shifted = torch.full_like(self.rows(self.labels), IGNORED)
        shifted[:, :-1] = self.rows(self.labels)[:, 1:]
        return shifted.flatten()

    @property
    def positions(self) -> torch.Tensor:
        """The place of every token in its document, (tokens)."""
        return torch.arange(len(self.ids), device=self.ids.device) % (len(self.ids) // self.documents)


class Job(ABC):
    """A model that is ready to train, with the ranks that share its sequences.

    models: those of this rank; several are chunks of a pipeline.
    title: for the table.
    ranks: that share a sequence.
    group: they, and others that hold tokens of the same sequence; None for one rank.
    words: of the vocabulary. padding: the word that means none.
    share: by it a gradient of a hidden state is multiplied where ranks share a text.
    sums: whether `examine` itself sums gradients over `group` and divides by `ranks`, as no framework does.
    divisor: the length of a document is a multiple of it.
    """

    models: list[Any]
    title: str
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    words: int
    padding: int | None = None
    share: float = 1.0
    sums: bool = False
    divisor: int = 1

    @abstractmethod
    def watched(self) -> Iterable[tuple[str, torch.nn.Module, bool]]:
        """Yield name and module of what gives (..., hidden) for each token, and whether it is attention or a state."""

    @abstractmethod
    def places(self, text: Text, *, alone: bool) -> torch.Tensor:
        """Return which tokens of the text this rank's rows of hidden states are, in their order."""

    @abstractmethod
    def step(self, text: Text, *, alone: bool) -> torch.Tensor | None:
        """Run forward and backward as the job does, and return the mean loss of the text, or None of other stages."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[Any]:
        """Return a context in which each rank computes whole texts by the framework's own attention."""

    def windows(self) -> Iterable[int]:
        """Yield the sliding windows of the layers."""
        return ()

    def unseen(self) -> Iterable[str]:
        """Yield what the proof does not look at."""
        return ()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every gradient as the optimizer takes it, this rank's part of it at least, by a name."""
        for name, parameter in self.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield name, getattr(gradient, "_local_tensor", gradient)  # of a DTensor

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that are trained, by name."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    yield f"{number}.{name}" if len(self.models) > 1 else name, parameter

    def clear(self) -> None:
        """Drop all gradients."""
        for _, parameter in self.parameters():
            parameter.grad = None

    @cached_property
    def device(self) -> torch.device:
        """Where texts go."""
        device: torch.device = next(x.device for model in self.models for x in model.parameters())
        return device

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave what a step changes beside gradients, buffers and random state as it was."""
        yield


def texts(job: Job, tokens: int | None) -> list[Text]:
    """Return a sequence and a pack of as many tokens, the same on every rank.

    Args:
        tokens: at least so many; None is a few for each rank, and twice the smallest window where that is short.
    """
    documents = next(n for n in (3, 5, 7, 11, 13, 17, 19, 23) if job.ranks == 1 or job.ranks % n)
    unit = 2 * job.ranks * documents * job.divisor
    window = 2 * min((x for x in job.windows() if 2 * x <= LONGEST), default=0)
    count = -(-(tokens or max(TOKENS * job.ranks, window)) // unit) * unit
    made = []
    for name, number, seed in (("a sequence", 1, 11), (f"a pack of {documents}", documents, 12)):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(job.words, (count,), generator=draw)
        ids[ids == (-1 if job.padding is None else job.padding)] = int(job.padding == 0)
        labels = torch.where(torch.rand(count, generator=draw) < 0.2, IGNORED, ids)
        labels[: TOKENS // 2] = IGNORED  # the first rank counts fewer than the others
        labels.view(2 * job.ranks, -1)[1:, 0] = ids.view(2 * job.ranks, -1)[1:, 0]  # of the next rank
        labels.view(number, -1)[:, 0] = IGNORED
        made.append(Text(name, ids.to(job.device), labels.to(job.device), number))
    return made
