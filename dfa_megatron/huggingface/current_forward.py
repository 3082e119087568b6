"""What belongs to one call of a model: whether attention is distributed, the documents of its batch, its positions.

A `Forward` is made once, by the hooks in model_inputs.py, and never changes. What runs in the call reads it here:
attention, rotary embeddings, recurrent layers, losses. A layer that is checkpointed runs again in the backward, perhaps
in another thread and after other calls: its checkpoint function has kept the `Forward` (checkpointing.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.seen import Documents, Images, Seen
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.runtime.agreement.calls import at_layer

NAME = "dfa"
"""As in `model.set_attn_implementation(NAME)`. A name with "flash" in it would change how models build their inputs."""

CONTEXT = "_dfa_attention"
"""The attribute of a module that holds its `LayerContext`."""

MUST_REACH = "_dfa_must_reach"
"""The attribute of a mixer for the names of functions that each forward of it must reach."""

Arguments = dict[str, Any]


@dataclass(slots=True)
class LayerContext:
    """Hold the settings of a model, and what its calls leave for later ones; the same object on all of its modules.

    before: the attention implementation that the model had.
    group: name of the process group that shares the sequence, "" for a single process.
    multimodal: the decoder belongs to a model with towers, which embeds whole sequences.
    unlisted: the model need not be on the list of what was tried.
    local: within `local_attention`.
    reads_logits: whether the Trainer that predicts does; None outside of its steps.
    compared: `changes` of the weights when the ranks compared them: in the first call, and after the first step.
    indexers: the weight of the loss that trains indexers; 0 where they are not trained.
    indexer_loss: that loss of the last call.
    """

    before: str
    group: str = ""
    size: int = 1
    options: TrainingConfig = field(default_factory=TrainingConfig)
    multimodal: bool = False
    unlisted: bool = False
    local: bool = False
    reads_logits: bool | None = None
    compared: tuple[int | None, ...] = ()
    indexers: float = 0.0
    indexer_loss: torch.Tensor | None = None

    def __deepcopy__(self, memo: object) -> LayerContext:
        return replace(self, indexer_loss=None)  # a tensor with a graph has no copies, and it is of this model's call


@dataclass(frozen=True, slots=True)
class Forward:
    """Hold what the modules of one call need to know of its batch.

    distributed: attention is over the ranks; else it is the model's own, over whole sequences of this rank.
    seen: the documents of every row, or the tree or mask that all rows have; None if each row is one document.
    images: where those of every row are whose tokens see each other both ways, by kind of layer.
    positions: int64 (batch or 1, local_seq), the places of this rank's tokens in their documents or paths.
    axes: the call has images or positions along axes, so that those which a model hands to its decoder count.
    longest: tokens of the longest document, or path, on all ranks.
    mask: (batch, local_seq), 0 for padding; None without.
    rows: the rows of the batch.
    labelled: whether the batch, or the step that it is a part of, has a label that counts; None without labels.
    tile: tokens of a tile of the loss; None where logits are made.
    layout: the tokens of a row that every rank holds; not read where attention is local.
    choices: the positions that indexers have chosen, for a recompute.
    scored: queries, keys and weights of indexers that are trained, until the attention of their layer takes it.
    index_losses: this rank's part of the loss of each, of the first pass.
    """

    context: LayerContext
    distributed: bool
    seen: Documents | Seen | None = None
    images: dict[str, tuple[Images, ...]] | None = None
    positions: torch.Tensor | None = None
    axes: bool = False
    longest: int = 0
    mask: torch.Tensor | None = None
    rows: int = 0
    labelled: torch.Tensor | None = None
    tile: int | None = None
    layout: Layout = contiguous(1, 1)  # noqa: RUF009
    choices: dict[torch.nn.Module, torch.Tensor] = field(default_factory=dict, compare=False)
    scored: dict[torch.nn.Module, tuple[torch.Tensor, ...]] = field(default_factory=dict, compare=False)
    index_losses: dict[torch.nn.Module, torch.Tensor | None] = field(default_factory=dict, compare=False)

    @property
    def where(self) -> Arguments:
        """Return the arguments of every call over the ranks: their group, its tokens, the options."""
        return {"group": self.context.group, "layout": self.layout, "config": self.context.options}


class Running(NamedTuple):
    """Hold a forward that runs, who entered it, and the functions of ours that its owner has reached."""

    owner: object
    forward: Forward
    reached: set[str]


_RUNNING: ContextVar[tuple[Running, ...]] = ContextVar("forwards that run", default=())
"""The forwards that run in this thread, the innermost last."""


def enter(owner: object, forward: Forward) -> None:
    """Let a forward run from now on, until its owner leaves."""
    _RUNNING.set((*_RUNNING.get(), Running(owner, forward, set())))


def leave(owner: object, *_: Any) -> None:
    """End the forward that an owner entered last; nothing if it failed to enter, or runs in that of another.

    It is a hook, too, to be called even if a module fails.
    """
    running = _RUNNING.get()
    if running and running[-1].owner is owner:
        _RUNNING.set(running[:-1])


def innermost() -> Running | None:
    """Return the innermost forward that runs."""
    stack = _RUNNING.get()
    return stack[-1] if stack else None


def reach(name: str) -> None:
    """Note that the innermost forward that runs, if any, has reached a function of ours."""
    if call := innermost():
        call.reached.add(name)


def forward_of_context(context: LayerContext | None) -> Forward | None:
    """Return the forward that runs, if it is one of this model."""
    call = innermost()
    return call.forward if call is not None and call.forward.context is context else None


def forward_of(module: torch.nn.Module) -> Forward:
    """Return the forward that a module runs in.

    Raises:
        UnsupportedError: its model is not distributed; or a layer is called alone, or by a user's checkpoint function.
    """
    forward = forward_of_context(getattr(module, CONTEXT, None))
    if forward is None:
        raise UnsupportedError(
            f"a layer of type {type(module).__name__} outside of a call of its distributed model",
            "nothing tells it the documents, or whether its attention is local",
            "distribute_attention(model), and a call of it. Where a function of your own checkpoints layers: "
            "checkpoint='full' or 'remat' of TrainingConfig, or PyTorch's checkpoint_wrapper",
        )
    return forward


def in_layer(layer: object) -> AbstractContextManager[None]:
    """Return a context in which errors name a layer by its number, from 1 on."""
    return at_layer(int(getattr(layer, "layer_idx", None) or 0) + 1)
