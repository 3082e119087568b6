"""What a layer knows beside its tensors: its settings, and the documents of the forward that it runs in.

A decoder passes the documents on as a keyword. Some decoders pass no keywords on; layers then ask here. A layer that is
checkpointed runs again in the backward, when another forward may have come between: it is told those of its own, and
whether its attention was local.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.positions.document_starts import Documents
from dfa_megatron.huggingface.positions.prompt_trees import Tree

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
    switched: whether attention was ever switched between distributed and local.
    held: whether it stays as it is for now, in training and evaluation.
    running: whether a forward of the whole model runs.
    """

    documents: Documents | Tree | None = None
    longest: int = 0
    added: int = 0
    positions: torch.Tensor | None = None
    told: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    switched: bool = False
    held: bool = False
    running: bool = False


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

TOLD: ContextVar[Run | None] = ContextVar("the forward of the layer that runs", default=None)


def run_of(module: torch.nn.Module, *, needed: bool = False) -> Run:
    """Return the documents of the forward in which a layer runs, in the backward too.

    Args:
        module: a layer with a `LayerContext`.
        needed: the layer needs them whether sequences were packed or not.

    Raises:
        UnsupportedError: it runs again in the backward, and its checkpoint function did not tell.
    """
    told = TOLD.get()
    if told is not None:
        return told
    context: LayerContext = getattr(module, CONTEXT)
    current = context.current
    if runs_again() and (needed or current.packed or current.switched):
        layer = type(module).__name__
        raise UnsupportedError(
            f"a layer of type {layer} that runs again in the backward",
            "the function that checkpoints it does not tell it the documents, or whether its attention was local",
            "checkpoint='full' or 'remat' of DistAttentionConfig, which does",
        )
    return current.documents, current.longest


def runs_again() -> bool:
    """Return whether this is a backward, in which a layer that runs was checkpointed."""
    return torch._C._current_graph_task_id() != -1
