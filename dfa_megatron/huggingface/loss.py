"""Scale the loss by one rule: P times the summed loss of this rank, over the labelled tokens of all P ranks.

The mean over the P ranks is the mean loss of the whole sequence. So a framework that averages gradients over all ranks
(DeepSpeed at every ZeRO stage, DDP, FSDP) gets the gradients of one process, wherever the labels are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.checks.padding import IGNORED
from dfa_megatron.huggingface.tiles.tiled_head import is_causal, run_in, summed_loss, tiled_head
from dfa_megatron.loss.head import TILE, Head
from dfa_megatron.loss.scores import token_scores
from dfa_megatron.runtime.comm.groups import Group, group_name, group_size, resolve

_MARK = "_dfa_sums_tokens"
"""The attribute of a loss function that its author marked, which holds the function."""

Function = TypeVar("Function", bound=Callable[..., Any])


def causal_lm_loss(
    logits: torch.Tensor,
    shift_labels: torch.Tensor,
    *,
    group: Group = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy of this rank's tokens, scaled so that the mean over ranks is the whole batch's loss.

    The group's labelled tokens are counted with one all-reduce of a number. Without any, the loss is 0 with gradient 0.

    Args:
        logits: (batch, local_seq, vocabulary); the loss is computed in float32, or float64 for float64.
        shift_labels: (batch, local_seq), the label of the next token (`shard_batch`), ignore_index where there is none.
        group: the ranks that share the sequence.
        ignore_index: the label of a token that has no loss.
        label_smoothing: ε of PyTorch's `cross_entropy`.
    """
    total = summed_loss(logits, shift_labels, ignore_index, label_smoothing)
    return mean_of_sequences(total, shift_labels, group, ignore_index)


def sums_tokens(function: Function) -> Function:
    """Mark a loss function of your own as a sum over this rank's tokens, divided by the count that it is given.

    `model.loss_function = sums_tokens(f)`: f(logits, labels, vocab_size, num_items_in_batch, shift_labels, ...) gets
    this rank's logits, and their labels as `shift_labels`. All that it adds must be such a sum.
    """
    setattr(function, _MARK, function)  # a copy, as functools.wraps makes, marks nothing
    return function


def adds_up(function: Any) -> bool:
    """Return whether a loss function is known to be such a sum: transformers' causal one, or one that was marked."""
    author = getattr(function, "__func__", function)
    return is_causal(function) or getattr(author, _MARK, None) is author


def mean_of_sequences(
    total: torch.Tensor, shift_labels: torch.Tensor, group: Group = None, ignore_index: int = IGNORED
) -> torch.Tensor:
    """Scale the summed loss of this rank's tokens by the rule; a collective call of the group."""
    name = group_name(group)
    count = (shift_labels != ignore_index).sum()
    if name:
        dist.all_reduce(count, group=resolve(name))
    return total * group_size(name) / count.clamp(min=1)


def tiled_loss(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    shift_labels: torch.Tensor,
    *,
    group: Group = None,
    tile: int = TILE,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """Return `causal_lm_loss(head(hidden), shift_labels)` with the logits of one tile at a time.

    The head is called once, and all gradients of its weight are one sum. So ZeRO reduces a weight that is shared with
    the embeddings when it is complete. DeepSpeed's `SequenceTiledCompute` lets ZeRO 2 and 3 reduce it too early. Its
    `TiledFusedLogitsLoss` ignores factors of the loss, such as gradient accumulation, in the head.

    Args:
        head: PyTorch's linear layer from hidden states to logits.
        hidden: (batch, local_seq, hidden size).
        shift_labels: (batch, local_seq), the label of the next token, ignore_index where there is none.
        group: the ranks that share the sequence.
        tile: tokens whose logits exist at a time.

    Raises:
        UnsupportedError: another kind of head, or a tile that is no positive integer.
    """

    def use(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, ...]:
        return (token_scores(hidden, head, shift_labels, tile=tile, ignore_index=ignore_index).logprobs,)

    (logprobs,) = run_in(tiled_head(head), hidden, use, 1.0, None)
    return mean_of_sequences(-logprobs.sum(), shift_labels, group, ignore_index)
