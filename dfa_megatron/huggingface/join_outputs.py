"""Put a model's outputs together again for trainers, which read those of all tokens: hooks around the model's own.

In evaluation every rank gets logits and hidden states of all tokens. TRL's trainers get the log-probabilities of all
tokens in training too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dfa_megatron.huggingface.batch import arguments_of
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext, forward_of
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import unshard_sequence

HOOKED = "_dfa_hooked_head"  # the attribute of a classifier for the hook of its head in its present call

_PADDING = "_dfa_padding"
"""The attribute of a model whose scores are joined for what was padded on the left of its present call's rows."""


def join_outputs(model: Any, *, scores: bool = False) -> None:
    """Register the hooks of a transformers model that `distribute_attention` prepared; may be called again.

    Args:
        scores: every rank gets what TRL's head makes of all tokens, (batch, seq - 1), and computes the same loss. Its
            gradient is P times that of this rank's tokens, so that the mean over the ranks is that of one process.
            Padding on the left, of prompts, is moved behind the tokens meanwhile.
    """
    if any(hook is _join for hook in model._forward_hooks.values()):
        return
    model.register_forward_hook(_join, prepend=True)  # before the forward ends
    if scores:
        setattr(model, _PADDING, None)
        model.register_forward_pre_hook(_padding_behind, with_kwargs=True, prepend=True)  # before the batch is cut


def _padding_behind(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move the padding on the left of each row of a batch behind its tokens."""
    setattr(model, _PADDING, None)
    batch = arguments_of(model, args, kwargs)
    mask = batch.get("attention_mask")
    if getattr(model, CONTEXT).local or mask is None or batch.get("position_ids") is not None:
        return None
    padding = left_padding(mask)
    setattr(model, _PADDING, padding)
    whole = {name for name, x in batch.items() if isinstance(x, torch.Tensor) and x.shape == mask.shape}
    return (), {name: rolled(x, padding) if name in whole else x for name, x in batch.items()}


def left_padding(mask: torch.Tensor) -> torch.Tensor:
    """Return the tokens of padding before each row of a mask (batch, seq)."""
    return (mask.cumsum(1) == 0).sum(1)


def rolled(value: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Move each row to the left by a number of its own; what leaves a row in front comes back behind it."""
    places = torch.arange(value.shape[1], device=value.device) + by[:, None]
    return value.gather(1, places % value.shape[1])


def _join(model: Any, args: Any, output: Any) -> Any:
    """Give every rank the outputs of all tokens: TRL's scores, and in evaluation all that has the tokens of a rank."""
    forward = forward_of(model)
    context, layout = forward.context, forward.layout
    if not forward.distributed or context.size == 1:
        return None
    group = resolve(context.group)
    assert group is not None

    def whole(value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 3 or value.shape[:2] != (forward.rows, layout.tokens(group.rank())):
            return value
        return unshard_sequence(value, group=group, layout=layout)

    def joined(name: str, value: Any) -> Any:
        if name in _OF_HEAD and hasattr(model, _PADDING):
            found = unshard_sequence(value, group=group, layout=layout)
            padding = getattr(model, _PADDING)
            return (found if padding is None else rolled(found, -padding))[:, :-1]
        if model.training or name not in _OF_TOKENS or (name == "logits" and context.reads_logits is False):
            return value
        return tree_map_only(torch.Tensor, whole, value)

    if isinstance(output, Mapping):
        for name, value in list(output.items()):
            output[name] = joined(name, value)  # type: ignore[index]
        return output
    if not isinstance(output, tuple):
        return joined("hidden_states", output)
    return tuple(joined("hidden_states", value) for value in output)


def classifies(model: Any) -> bool:
    """Return whether a model scores sequences in the one way that transformers has for most types."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(model, GenericForSequenceClassification)


def join_scores(model: Any) -> None:
    """Let the head's scores, of which the model takes each row's last, be those of all tokens.

    Such a model keeps whole batches: its decoder cuts them. Every rank computes the same loss, with gradients as above.
    A head may be replaced, wrapped or copied at any time (PEFT), so each call hooks the one that the model has then.
    """
    model.register_forward_pre_hook(_hook_head)
    model.register_forward_hook(_leave_head, always_call=True)


def _hook_head(model: Any, args: Any) -> None:
    context: LayerContext = getattr(model, CONTEXT)
    if context.size > 1 and not context.local:
        group = resolve(context.group)
        vars(model)[HOOKED] = model.score.register_forward_hook(lambda *of: unshard_sequence(of[-1], group=group))


def _leave_head(model: Any, *_: Any) -> None:
    if (hook := vars(model).pop(HOOKED, None)) is not None:
        hook.remove()


_OF_TOKENS = ("logits", "last_hidden_state", "hidden_states")
"""The outputs that are put together; others, such as a router's or a tower's, may be as long by chance."""

_OF_HEAD = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""The outputs of TRL's fused head, of which None are left out."""
