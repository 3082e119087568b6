"""Scale the loss by one rule: P times the summed loss of this rank, over the labelled tokens of the whole batch.

The mean over the P ranks is the loss of the whole batch, which every rank gets. Its gradient is that of this rank's
term. So a framework that averages gradients over all ranks (DeepSpeed at every ZeRO stage, DDP, FSDP) gets the
gradients of one process, wherever the labels are.

The loss by which models balance their experts (output_router_logits) is a product of sums over tokens, so the mean of
the ranks' own would be another: the ranks add up these sums.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import refuse_unreached, surround
from dfa_megatron.huggingface.batch import LABELS, first_of, next_labels, tokens_of
from dfa_megatron.huggingface.current_forward import Arguments, LayerContext, innermost, reach
from dfa_megatron.huggingface.tiled_head import causal_loss, is_causal, run_in, summed_loss, tiled_head
from dfa_megatron.kernels.leaf import outside_graphs
from dfa_megatron.loss.deferred import DeferredLogits
from dfa_megatron.loss.head import TILE
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.runtime.comm.compared import compared, together
from dfa_megatron.runtime.comm.groups import Group, channel_of, group_name, group_size, resolve
from dfa_megatron.sharding import shard_sequence, unshard_sequence

_MARK = "_dfa_sums_tokens"
"""The attribute of a loss function that its author marked, which holds the function."""

Function = TypeVar("Function", bound=Callable[..., Any])


@together
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
        DisagreementError: the ranks ask for different losses.
    """
    mine, share = _of_this_rank(logits, labels, group, ignore_index)
    loss = summed_loss(logits, mine, ignore_index, label_smoothing)
    asked = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return as_whole((loss * share).to(loss.dtype), group, f"of labels {tuple(labels.shape)}", **asked)


@outside_graphs
def _of_this_rank(
    x: torch.Tensor, labels: torch.Tensor, group: Group, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels of the next tokens of this rank's tokens, and P over the number of those of all, in float64.

    x: (batch, local_seq, ...).
    """
    shifted, size = next_labels(labels, ignore_index), group_size(group)
    mine = shard_sequence(shifted, group=group)
    if mine.shape != x.shape[:2]:
        raise UnsupportedError(
            f"labels of shape {tuple(labels.shape)} for {tuple(x.shape[:2])} tokens on each of {size} ranks",
            "they are shifted, and then cut, here",
            "labels (batch, seq) of the whole batch, the same on every rank, not shifted",
        )
    return mine, size / (shifted != ignore_index).sum().clamp(min=1).double()


@outside_graphs
def as_whole(loss: torch.Tensor, group: Group, about: str = "", **asked: object) -> torch.Tensor:
    """Return the mean of a loss over the ranks, whose gradient is that of this rank's loss; a collective call.

    asked: the ranks compare it, and `about`, which varies, at each call. Without any they compare nothing.
    """
    total = loss.detach().clone()
    if name := group_name(group):
        facts = {key: str(x) for key, x in {"dtype": loss.dtype, "gradient": loss.requires_grad, **asked}.items()}
        exchange = compared("a loss of a whole batch", channel_of(group) if asked else None, facts, loss.device, about)
        with exchange.running(0, loss.device):
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


@together
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
        DisagreementError: the ranks ask for different losses.
    """
    mine, share = _of_this_rank(hidden, labels, group, ignore_index)
    tiled = tiled_head(head)
    logits = DeferredLogits(functools.partial(run_in, tiled, hidden), tile, tiled.out_features, tiled)
    loss = logits.losses(mine, ignore_index).sum()
    about = f"of labels {tuple(labels.shape)}"
    return as_whole((loss * share).to(loss.dtype), group, about, ignore_index=ignore_index)


def check_loss(model: Any, given: Arguments, context: LayerContext) -> None:
    """Refuse the ways in which a model's own loss would be wrong on a part of a sequence."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    if first_of(given, LABELS) is None or context.size == 1:
        return
    own = model.loss_function if computes_loss(model) else f"in {type(model).__name__}.forward"
    own = LOSS_MAPPING.get(model.loss_type, own) if own is causal_loss else own  # which stands for what the type names
    author = getattr(own, "__func__", own)
    if not is_causal(own) and getattr(author, _MARK, None) is not author:
        raise UnsupportedError(
            f"labels for the loss function {getattr(own, '__qualname__', own)}",
            "it is given the labels of this rank's tokens, already shifted, and might shift them or take their mean",
            "transformers' ForCausalLMLoss; a function that dfa_megatron.huggingface.sums_tokens marks; or no labels, "
            "and causal_lm_loss on the logits",
        )
    ignored, count = given.get("ignore_index"), given.get("num_items_in_batch")
    if ignored not in (None, IGNORED):
        raise UnsupportedError(f"ignore_index={ignored} in a call", f"the ranks count labels but for {IGNORED}", "-100")
    if isinstance(count, torch.Tensor) and count.dtype in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"num_items_in_batch of {count.dtype}",
            "mixed precision rounded it, which would scale the loss",
            "a Python number or an integer tensor: the labels of the whole batch",
        )
    if first_of(given, LABELS).shape != tokens_of(given).shape[:2]:
        raise UnsupportedError(
            f"labels of shape {tuple(first_of(given, LABELS).shape)}",
            "each token of the batch has one, and the model cuts them alike",
            "labels (batch, seq) of whole sequences, not shifted, or shift_labels",
        )


def computes_loss(model: Any) -> bool:
    """Return whether a model computes its loss by transformers' loss function, which takes the number of labels."""
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


_BALANCE = "load_balancing_loss_func"
"""The function in a model's file, the same in all of them."""


def follow_router(forward: Callable[..., Any]) -> None:
    """Let the loss of routers in the file of a model's forward count the tokens of all ranks; may be called again."""
    if home := sys.modules.get(inspect.unwrap(forward).__module__):
        surround(home, _BALANCE, _of_all_ranks, optional=True)


def check_reached(model: Any, output: Any, loss: torch.Tensor | None) -> None:
    """Refuse a call whose forward did not use our losses, as after another package replaced the forward."""
    call = innermost()
    assert call is not None
    if isinstance(output, Mapping):
        balance = output.get("aux_loss")
    else:
        balance = next((x for x in output[loss is not None :] if getattr(x, "ndim", 1) == 0), None)
    if balance is not None and _BALANCE not in call.reached:
        refuse_unreached(model, [_BALANCE])
    smooths = getattr(getattr(model, "loss_function", None), "func", None) is causal_loss
    if smooths and loss is not None and causal_loss.__name__ not in call.reached:
        what = f"label smoothing with a {type(model).__name__} whose forward makes the loss itself, as Liger's does"
        raise UnsupportedError(what, "it smooths no labels", "label_smoothing_factor=0, or use_liger_kernel=False")


def _of_all_ranks(
    real: Callable[..., Any], gate_logits: Any, num_experts: int | None = None, top_k: int = 2, *masks: Any, **more: Any
) -> Any:
    """Return the loss of Switch Transformer's equations 4 to 6 as transformers computes it, of the whole sequences.

    Args:
        gate_logits: of every layer (batch x local_seq, experts).
    """
    reach(_BALANCE)
    call = innermost()
    if call is None or not call.forward.distributed or not isinstance(gate_logits, tuple) or num_experts is None:
        return real(gate_logits, num_experts, top_k, *masks, **more)
    forward, experts = call.forward, num_experts
    device = gate_logits[0].device
    counted = torch.ones(len(gate_logits[0]), dtype=torch.float32, device=device)
    if forward.mask is not None:  # 0 for padding
        counted = forward.mask.to(device, torch.float32).flatten()
    counts, chances = torch.zeros(2, experts, dtype=torch.float32, device=device)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1).indices
        counts = counts.scatter_add(0, chosen.flatten(), counted.repeat_interleave(top_k))
        chances = chances + (weights.float() * counted[:, None]).sum(0)
    sums = torch.cat((counts, chances, counted.sum()[None] * len(gate_logits)))
    if forward.context.group:  # gradients are summed over the ranks too: every loss depends on the tokens of all
        sums = unshard_sequence(sums[None], group=forward.context.group, dim=0).sum(0)
    counts, chances, rows = sums.split((experts, experts, 1))
    return (counts / rows * (chances / rows)).sum() * experts
