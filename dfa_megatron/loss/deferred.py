"""Logits that a framework's model passes from its head to its loss without making them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss.head import Head
from dfa_megatron.loss.scores import IGNORED, cross_entropy, token_scores
from dfa_megatron.loss.tiled import Tiling, best

logger = logging.getLogger(__name__)

WATCHED = "_dfa_scores"
"""The attribute of a model's head that holds the `Scores` of `scores_of`."""

Use = Callable[[torch.Tensor, Head], tuple[torch.Tensor, ...]]
"""A function of hidden states and the head."""


class DeferredLogits:
    """Stand for the logits of a call with labels; they know their hidden states and what was done to them since.

    Factors and a tanh between head and loss are taken over, as Gemma, Cohere, Granite and Megatron's muP have them.
    Everything else that code does to logits is an error.

    Args:
        run: gives a function the hidden states and the `Head`, from a scale and a softcap. A framework's hooks of the
            head's module run around it.
        tile: tokens of a tile.
        vocabulary: this rank's rows.
        watched: the module that `scores_of` marks.
    """

    def __init__(
        self, run: Callable[[Use, float, float | None], Any], tile: int, vocabulary: int, watched: torch.nn.Module
    ) -> None:
        self._run, self._tile, self._vocabulary, self._watched = run, tile, vocabulary, watched
        self._inner, self._outer = 1.0, 1.0
        self._capped = False

    def losses(self, labels: torch.Tensor, ignore_index: int = IGNORED, smoothing: float = 0.0) -> torch.Tensor:
        """Return the loss of each label, 0 for an ignored one; `scores_of` finds nothing where labels are smoothed."""
        watching: Scores | None = None if smoothing else getattr(self._watched, WATCHED, None)

        def use(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, ...]:
            given: Any = {"tile": self._tile, "ignore_index": ignore_index}
            if smoothing:
                return (cross_entropy(hidden, head, labels, reduction="none", label_smoothing=smoothing, **given),)
            scores = token_scores(hidden, head, labels, entropy=watching is not None, **given)
            # A tuple, in which the hooks of ZeRO 3 look for tensors, and no view, which those of FSDP2 warn of.
            return (-scores.logprobs,) if scores.entropy is None else (-scores.logprobs, scores.entropy)

        found: tuple[torch.Tensor, ...] = self._run(use, *self._shape())
        if watching is not None:
            watching.logprobs, watching.entropy = -found[0], found[1]
        return found[0]

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each token and its row of this rank, (seq, batch) each: Megatron counts hits."""
        if dim != -1:
            raise self._refused(f"max(dim={dim})")

        def use(hidden: torch.Tensor, head: Head) -> Any:
            rows = hidden.reshape(-1, hidden.shape[-1])
            found = best(rows, head.weight, head.bias, Tiling(head, self._tile, 0, entropy=False, total=False))
            return tuple(each.view(-1, *hidden.shape[1:-1]) for each in found)

        found: tuple[torch.Tensor, torch.Tensor] = self._run(use, *self._shape())
        return found

    def size(self, dim: int) -> int:
        """Return the rows of this rank, for the last dimension."""
        if dim != -1:
            raise self._refused(f"size({dim})")
        return self._vocabulary

    def to(self, *_: Any, **__: Any) -> DeferredLogits:
        """Return itself: a tile has the device of the hidden states and is in float32."""
        return self

    float = to

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, (int, float)):
            raise self._refused("a product with a tensor")
        new, name = copy(self), "_outer" if self._capped else "_inner"
        setattr(new, name, getattr(self, name) * factor)
        return new

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self * (1 / divisor if isinstance(divisor, (int, float)) else divisor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer torch.tanh and torch.argmax of the last dimension."""
        logits = next((x for x in args if isinstance(x, DeferredLogits)), None)
        name = getattr(function, "__name__", str(function))
        if logits is not None and function is torch.tanh and not logits._capped:
            new = logits * 1.0
            new._capped = True
            return new
        if logits is not None and function is torch.argmax and (kwargs or {}).get("dim", args[-1]) == -1:
            return logits.max(dim=-1)[1]
        raise cls._refused(name)

    def __getattr__(self, name: str) -> Any:
        """Say why an attribute of tensors is missing; called only where Python finds none."""
        raise AttributeError(str(self._refused(name)))

    def _shape(self) -> tuple[Any, Any]:
        """Return scale and softcap, None for no cap."""
        return self._inner * (self._outer if self._capped else 1), self._outer if self._capped else None

    @staticmethod
    def _refused(name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name} of the logits of a call with labels, with loss_tile",
            "they exist one tile at a time",
            "loss_tile='off', or a call without labels",
        )


@functools.cache
def say_tiled(tile: int) -> None:
    """Log once that losses are made by tiles of this size."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("dfa: the loss is made by tiles of %d tokens", tile)


class Scores:
    """What `scores_of` found at the last loss.

    logprobs, entropy: of each token of this rank, in the shape of the labels, with gradients; None before a call.
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


@contextmanager
def scores_of(model: torch.nn.Module) -> Iterator[Scores]:
    """Read log-probabilities and entropy of each token at a model's loss, in training and evaluation::

        with scores_of(model) as scores:
            loss = model(**batch).loss              # transformers; or Megatron's model(..., labels=labels)
        by_document(scores.logprobs[0], cu_seqlens, group=group)

    With prediction layers of several tokens it holds those of the next token.

    Raises:
        UnsupportedError: the model has no head whose loss is made by tiles.
    """
    heads = [module for module in model.modules() if hasattr(module, WATCHED)]
    if len(heads) != 1:
        raise UnsupportedError(
            f"scores_of a {type(model).__name__} with {len(heads)} losses made by tiles",
            "they are read at the one loss that is made by tiles",
            "a model with loss_tile; of a pipeline, the last stage",
        )
    scores = Scores()
    setattr(heads[0], WATCHED, scores)
    try:
        yield scores
    finally:
        setattr(heads[0], WATCHED, None)
