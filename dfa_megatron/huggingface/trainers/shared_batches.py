"""Let a model take whole batches, the same on every rank of a group, as trainers hand them over.

Hooks cut each batch into this rank's part. In evaluation they put the outputs together again, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.batch import KNOWN, MEDIA, refuse_batch, shard_batch
from dfa_megatron.huggingface.checks.call_checks import arguments_of, check_generation
from dfa_megatron.huggingface.checks.padding import IGNORED
from dfa_megatron.huggingface.current_forward import CONTEXT, WHOLE, LayerContext, WholeBatch, forward_of
from dfa_megatron.huggingface.implementation import is_distributed
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.trainers.read_logits import reads_logits
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import unshard_sequence

_COUNTS = "_dfa_counts_whole_batches"
"""The attribute of a model for whether `num_items_in_batch`, where given, counts whole batches."""

_SCORES = "_dfa_whole_scores"
"""The attribute of a model for whether every rank gets the log-probabilities of all tokens."""


def take_whole_batches(model: Any, *, counts: bool = True, scores: bool = False) -> None:
    """Register the hooks of a transformers model that `distribute_attention` prepared; may be called again.

    Args:
        counts: `num_items_in_batch`, where given, counts whole batches; Trainer's is this rank's share.
        scores: every rank gets what TRL's head makes of all tokens, (batch, seq - 1), and computes the same loss. Its
            gradient is P times that of this rank's tokens, so that the mean over the ranks is that of one process.
            Padding on the left, of prompts, is moved behind the tokens meanwhile.
    """
    if not takes_whole_batches(model):
        model.register_forward_pre_hook(_cut, with_kwargs=True, prepend=True)  # before the checks of a part
        model.register_forward_hook(_join, prepend=True)  # before the forward ends
    setattr(model, _COUNTS, counts)
    setattr(model, _SCORES, scores)


def takes_whole_batches(model: Any) -> bool:
    """Return whether a model cuts its batches itself."""
    return hasattr(model, _COUNTS)


def _cut(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace a whole batch by this rank's part; the count of labels, if given, is the caller's, of whole batches."""
    if not is_distributed(model):
        return None
    context: LayerContext = getattr(model, CONTEXT)
    given = {name: value for name, value in arguments_of(model, args, kwargs).items() if value is not None}
    check_generation(given, context)
    batch = {name: given.pop(name) for name in (*KNOWN, *MEDIA) if name in given}
    if "input_ids" not in batch or batch_number.KEY in given:
        refuse_batch((*batch, *given))
    rows, length = batch["input_ids"].shape[:2]
    batch, padding = _padding_behind(batch) if getattr(model, _SCORES) else (batch, None)
    labels = batch.get("labels")
    whole = WholeBatch(rows, None if labels is None else (labels[..., 1:] != IGNORED).any(), padding=padding)
    part = shard_batch(batch, group=context.group or None)
    made = part.keys() - {"num_items_in_batch"}
    of_tokens = {name for name, x in given.items() if isinstance(x, torch.Tensor) and length in x.shape}
    others = ", ".join(name for name in given if name in made | of_tokens)
    if others:
        raise UnsupportedError(
            f"{others} beside the tokens of a shared batch",
            "they would stay whole, or take the place of what is made for this rank's part",
            "input_ids and labels, of which shift_labels are made",
        )
    if getattr(model, _COUNTS) and (count := given.get("num_items_in_batch")) is not None:
        given["num_items_in_batch"] = count / context.size
    return (), part | given | {WHOLE: whole}


def _padding_behind(batch: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return a batch with the padding that was on the left of each row on its right, and how much that was."""
    mask = batch.get("attention_mask")
    if mask is None or "position_ids" in batch:
        return batch, None
    padding = (mask.cumsum(1) == 0).sum(1)
    whole = {name for name, x in batch.items() if isinstance(x, torch.Tensor) and x.shape == mask.shape}
    return {name: _rolled(x, padding) if name in whole else x for name, x in batch.items()}, padding


def _rolled(value: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Move each row to the left by a number of its own; what leaves a row in front comes back behind it."""
    places = torch.arange(value.shape[1], device=value.device) + by[:, None]
    return value.gather(1, places % value.shape[1])


def _join(model: Any, args: Any, output: Any) -> Any:
    """Give every rank the mean of the losses, and in evaluation the outputs of all tokens.

    In training the gradient stays that of this rank's part. In evaluation, without a label that counts, the loss is
    NaN, as in one process: Trainer leaves it out of its mean.
    """
    forward = forward_of(model)
    context, batch = forward.context, forward.whole
    if batch is None or context.size == 1:
        return None
    layout, group = forward.layout, resolve(context.group)
    assert isinstance(layout, Layout)
    assert group is not None

    def whole(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0:
            total = value.detach().clone()
            dist.all_reduce(total, group=group)
            return total / context.size
        if value.dim() < 3 or value.shape[:2] != (batch.rows, layout.tokens(group.rank())):
            return value
        return unshard_sequence(value, group=group, layout=layout)

    def joined(name: str, value: Any) -> Any:
        if name == "loss" and batch.labelled is not None:
            if model.training:
                return whole(value) + (value - value.detach())
            return torch.where(batch.labelled.to(value.device), whole(value), torch.nan)
        if name in _OF_HEAD and getattr(model, _SCORES):
            found = unshard_sequence(value, group=group, layout=layout)
            return (found if batch.padding is None else _rolled(found, -batch.padding))[:, :-1]
        if model.training or name not in _OF_TOKENS or (name == "logits" and reads_logits() is False):
            return value
        return tree_map_only(torch.Tensor, whole, value)

    if isinstance(output, Mapping):
        for name, value in list(output.items()):
            output[name] = joined(name, value)  # type: ignore[index]
        return output
    if not isinstance(output, tuple):
        return joined("hidden_states", output)
    first = "hidden_states" if batch.labelled is None else "loss"
    return tuple(joined("hidden_states" if at else first, value) for at, value in enumerate(output))


_OF_TOKENS = ("loss", "logits", "last_hidden_state", "hidden_states")
"""The outputs that are put together; others, such as a router's or a tower's, may be as long by chance."""

_OF_HEAD = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""The outputs of TRL's fused head, of which None are left out."""
