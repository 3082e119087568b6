"""Let a model of transformers that scores whole sequences, as a reward model does, have its scores on every rank.

Such a model keeps whole batches, its decoder cuts them, and the scores of all tokens, one or a few numbers each, are
joined behind the head. The model then takes that of each row's last token.
"""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import unshard_sequence


def classifies(model: Any) -> bool:
    """Return whether a model scores sequences in the one way that transformers has for most types."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(model, GenericForSequenceClassification)


def join_scores(model: Any, context: LayerContext) -> None:
    """Let the head's scores be those of all tokens; may be called again.

    Every rank computes the same loss, and the gradient of this rank's tokens is P times its own, so that the mean over
    the ranks is that of one process.
    """
    setattr(model.score, CONTEXT, context)
    if _join not in model.score._forward_hooks.values():
        model.score.register_forward_hook(_join)


def _join(head: Any, args: Any, scores: torch.Tensor) -> torch.Tensor:
    context: LayerContext = getattr(head, CONTEXT)
    if context.local or context.size == 1:
        return scores
    return unshard_sequence(scores, group=resolve(context.group))
