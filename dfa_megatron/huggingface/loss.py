"""Scale the loss by one rule: P times the summed loss of this rank, over the labelled tokens of the whole batch.

The mean over the P ranks is the loss of the whole batch, which every rank gets. Its gradient is that of this rank's
term. So a framework that averages gradients over all ranks (DeepSpeed at every ZeRO stage, DDP, FSDP) gets the
gradients of one process, wherever the labels are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.padding import IGNORED, next_labels
from dfa_megatron.huggingface.tiled_head import is_causal, run_in, summed_loss, tiled_head
from dfa_megatron.loss.head import TILE, Head
from dfa_megatron.loss.scores import token_scores
from dfa_megatron.runtime.comm.groups import Group, group_name, group_size, resolve
from dfa_megatron.sharding import shard_sequence

_MARK = "_dfa_sums_tokens"
"""The attribute of a loss function that its author marked, which holds the function."""

Function = TypeVar("Function", bound=Callable[..., Any])


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: Group = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy of a whole batch from the logits of this rank's tokens; a collective call.

    Without a label that counts, the loss is 0 with gradient 0.

    Args:
        logits: (batch, local_seq, vocabulary); the loss is computed in float32, or float64 for float64.
        labels: (batch, seq) of the whole batch, the same on every rank, not shifted; ignore_index where there is none.
        group: the ranks that share the sequence.
        ignore_index: the label of a token that has no loss.
        label_smoothing: ε of PyTorch's `cross_entropy`.

    Returns:
        The same number on every rank. The mean of its gradients over the ranks is the whole batch's.

    Raises:
        UnsupportedError: labels of another number of tokens, such as those of this rank's tokens alone.
    """
    mine, share = _of_this_rank(logits, labels, group, ignore_index)
    return as_whole(_times(summed_loss(logits, mine, ignore_index, label_smoothing), share), group)


def _of_this_rank(
    x: torch.Tensor, labels: torch.Tensor, group: Group, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels of the next tokens of this rank's tokens, and P over the number of those of all ranks.

    x: (batch, local_seq, ...).
    """
    shifted = next_labels(labels, ignore_index)
    mine, size = shard_sequence(shifted, group=group), group_size(group)
    if mine.shape != x.shape[:2]:
        raise UnsupportedError(
            f"labels of shape {tuple(labels.shape)} for {tuple(x.shape[:2])} tokens on each of {size} ranks",
            "they are shifted, and then cut, here",
            "labels (batch, seq) of the whole batch, the same on every rank, not shifted",
        )
    return mine, size / (shifted != ignore_index).sum().clamp(min=1).double()


def _times(loss: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return a loss times a share, which is in float64 and would make it so."""
    return (loss * share).to(loss.dtype)


def as_whole(loss: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean of a loss over the ranks, whose gradient is that of this rank's loss; a collective call."""
    total = loss.detach().clone()
    if name := group_name(group):
        dist.all_reduce(total, group=resolve(name))
        total /= group_size(group)
    return total + (loss - loss.detach())


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


def tiled_loss(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: Group = None,
    tile: int = TILE,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """Return `causal_lm_loss(head(hidden), labels)` with the logits of one tile at a time.

    The head is called once, and all gradients of its weight are one sum. So ZeRO reduces a weight that is shared with
    the embeddings when it is complete. DeepSpeed's `SequenceTiledCompute` lets ZeRO 2 and 3 reduce it too early. Its
    `TiledFusedLogitsLoss` ignores factors of the loss, such as gradient accumulation, in the head.

    Args:
        head: PyTorch's linear layer from hidden states to logits.
        hidden: (batch, local_seq, hidden size).
        labels: as of `causal_lm_loss`.
        group: the ranks that share the sequence.
        tile: tokens whose logits exist at a time.

    Raises:
        UnsupportedError: another kind of head, or a tile that is no positive integer.
    """

    mine, share = _of_this_rank(hidden, labels, group, ignore_index)

    def use(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, ...]:
        return (token_scores(hidden, head, mine, tile=tile, ignore_index=ignore_index).logprobs,)

    (logprobs,) = run_in(tiled_head(head), hidden, use, 1.0, None)
    return as_whole(_times(-logprobs.sum(), share), group)
