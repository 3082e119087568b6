"""What a layer knows beside its tensors: its settings, and the documents of the forward that it runs in.

A decoder passes the documents on as a keyword. Some decoders pass no keywords on; layers then ask here. A layer that is
checkpointed runs again in the backward, when another forward may have come between: it is told those of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface.positions.document_starts import Documents
from dfa_megatron.huggingface.positions.prompt_trees import Tree
from dfa_megatron.huggingface.refusals import ATTENTION

CONTEXT = "_dfa_attention"
"""The attribute of a module that holds its `LayerContext`."""


@dataclass(slots=True)
class Current:
    """Hold facts of the last forward's batch, for modules that do not receive them.

    documents: of every row, None if each row is one; or the segments of a prompt tree.
    longest: tokens of its longest document, or path, on all ranks, without added ones; 0 while attention is local.
    added: tokens behind each row that only make its length divide.
    positions: int64 (batch or 1, local_seq), of this rank's tokens.
    told: what a model that does not hand it on was given for its decoder: positions, offsets of documents, images.
    packed: whether any forward had documents.
    """

    documents: Documents | Tree | None = None
    longest: int = 0
    added: int = 0
    positions: torch.Tensor | None = None
    told: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Hold an attention layer's settings beside its tensors; plain values, so that a model can be copied.

    group: name of the process group that shares the sequence, "" for a single process.
    before: the attention implementation that the model had.
    current: facts of the last forward's batch.
    accelerate: batches come from accelerate: in evaluation every rank has whole sequences of its own, and the loss of
        this rank's tokens is weighed by who called the model.
    parts: the decoder belongs to a model of several parts, which embeds whole sequences.
    """

    group: str
    size: int
    options: DistAttentionConfig
    before: str
    accelerate: bool = False
    parts: bool = False
    current: Current = field(default_factory=Current)


Run = tuple[Documents | Tree | None, int]
"""The documents of a forward, and the tokens of the longest."""

_TOLD: ContextVar[Run | None] = ContextVar("the forward of the layer that runs", default=None)


def run_of(module: torch.nn.Module, *, needed: bool = False) -> Run:
    """Return the documents of the forward in which a layer runs, in the backward too.

    Args:
        module: a layer with a `LayerContext`.
        needed: the layer needs them whether sequences were packed or not.

    Raises:
        UnsupportedError: it runs again in the backward, and its checkpoint function did not tell.
    """
    told = _TOLD.get()
    if told is not None:
        return told
    context: LayerContext = getattr(module, CONTEXT)
    current = context.current
    again = torch._C._current_graph_task_id() != -1
    ATTENTION.check(lost_in_recompute=again and (needed or current.packed), layer=type(module).__name__)
    return current.documents, current.longest


def telling(checkpoint: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
    """Return a checkpoint function that tells layers the documents of their forward, whenever they run.

    Args:
        checkpoint: called as checkpoint(layer, *inputs).
        model: it has a `LayerContext` by the time of a forward.
    """
    return functools.partial(_checkpoint, checkpoint, model)


def _checkpoint(checkpoint: Callable[..., Any], model: torch.nn.Module, layer: Any, *inputs: Any, **more: Any) -> Any:
    current: Current = getattr(model, CONTEXT).current
    return checkpoint(functools.partial(_run, (current.documents, current.longest), layer), *inputs, **more)


def _run(run: Run, layer: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    token = _TOLD.set(run)
    try:
        return layer(*inputs, **more)
    finally:
        _TOLD.reset(token)
