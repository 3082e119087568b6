"""The public functions: log-probabilities and entropy of each token, and the cross-entropy with its usual options."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.loss.head import TILE, Head
from dfa_megatron.loss.tiled import ENTROPY, LABEL, LSE, TOTAL, Tiled, Tiling, agree
from dfa_megatron.names import nearest

IGNORED = -100
"""The label of a token without a loss, as in PyTorch."""

REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Numbers of each token, in the shape of the labels, in float32 (float64 for float64); all have gradients.

    logprobs: of the label, in nats; 0 for an ignored label.
    lse: log-sum-exp of the logits.
    entropy: of the whole distribution, in nats, also where the label is ignored; None if it was not asked for.
    """

    logprobs: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None


def token_scores(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    tile: int = TILE,
    ignore_index: int = IGNORED,
    entropy: bool = False,
) -> TokenScores:
    """Return the log-probability of each label, and the entropy on request, with the logits of one tile at a time.

    A collective call of `head.group`, in the forward and the backward.

    Args:
        hidden: (..., hidden size). With `head.sequence_parallel` the tokens come first and are this rank's 1/TP.
        head: the weight and its ranks. Autocast is honoured.
        labels: (...), indices into the whole vocabulary, of all tokens, the same on every rank of `head.group`. A label
            outside the vocabulary gives NaN.
        tile: tokens whose logits exist at a time.
        ignore_index: the label of a token whose log-probability is 0.
        entropy: needs the memory of a second tile in float32.

    Raises:
        UnsupportedError: a tile that is no positive integer, labels of another number of tokens, or a partition that
            does not fit.
        DisagreementError: the ranks of `head.group` ask for different things. Later, on a GPU, the numbers are NaN.
    """
    result = _result(hidden, head, labels, tile=tile, entropy=entropy, ignore_index=ignore_index)[0]
    label, lse = result[LABEL], result[LSE]
    logprobs = torch.where(labels.flatten() == ignore_index, 0, label - lse)
    return TokenScores(
        logprobs=logprobs.view(labels.shape),
        lse=lse.view(labels.shape),
        entropy=result[ENTROPY].view(labels.shape) if entropy else None,
    )


def cross_entropy(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    tile: int = TILE,
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of the head's logits, which exist one tile at a time.

    Args:
        hidden, head, labels, tile, ignore_index: as for `token_scores`.
        reduction: "none" gives the shape of the labels, "sum" and "mean" a number. The mean is over the labels that are
            not ignored; without any it is 0.
        label_smoothing: ε of PyTorch's definition: ε / vocabulary to each word, 1 - ε more to the label.
        z_loss: factor of lse², which is added to the loss of each token that counts (PaLM, arXiv:2204.02311).

    Raises:
        UnsupportedError: as for `token_scores`, or an unknown reduction.
    """
    asked = {"tile": tile, "reduction": reduction, "ignore_index": ignore_index}
    asked |= {"z_loss": float(z_loss), "label_smoothing": float(label_smoothing)}  # a tensor names its device
    result, vocabulary = _result(hidden, head, labels, **asked)
    label, lse = result[LABEL], result[LSE]
    losses = lse - label
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (lse - result[TOTAL] / vocabulary)
    if z_loss:
        losses = losses + z_loss * lse.square()
    ignored = labels.flatten() == ignore_index
    losses = torch.where(ignored, 0, losses)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum().clamp(min=1)


def _result(hidden: torch.Tensor, head: Head, labels: torch.Tensor, **asked: Any) -> tuple[Any, int]:
    """Return (4, tokens) as `Tiled` does, and the size of the vocabulary. asked: what else the ranks compare."""
    try:
        _check(hidden, head, labels, asked)
        hidden, weight, bias = tensors = _autocast(hidden, head.weight, head.bias)
        if len(kinds := dict.fromkeys(x.dtype for x in tensors if x is not None)) > 1:
            what = f"a loss of {', '.join(map(str, kinds))}"
            raise UnsupportedError(what, "its hidden states and head are multiplied", "one dtype, or autocast")
    except UnsupportedError as error:
        with suppress(DisagreementError):  # this rank's own reason is the clearer one
            agree(head, str(error))
        raise
    asked |= {name: getattr(head, name) for name in ("scale", "softcap", "partition", "sequence_parallel")}
    asked |= {"dtype": hidden.dtype, "hidden size": hidden.shape[-1]}
    asked["gradient"] = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    sizes, differs = agree(head, str(asked), f" of labels {tuple(labels.shape)}")
    vocabulary, first = head.vocabulary(sizes)
    tiling = Tiling(head, asked["tile"], first, bool(asked.get("entropy")), bool(asked.get("label_smoothing")), differs)
    hidden = hidden.reshape(labels.numel() // head.shards, hidden.shape[-1])
    result: Any = Tiled.apply(hidden, weight, bias, labels.flatten(), tiling)  # type: ignore[no-untyped-call]
    return result, vocabulary


def _check(hidden: torch.Tensor, head: Head, labels: torch.Tensor, asked: Mapping[str, Any]) -> None:
    """Refuse options, and hidden states, a head and labels that do not belong together."""
    tile, reduction, share = asked["tile"], asked.get("reduction", "none"), asked.get("label_smoothing", 0)
    if type(tile) is not int or tile < 1:
        raise UnsupportedError(f"tile={tile!r}", "a tile is a number of tokens", f"an integer from 1, such as {TILE}")
    if reduction not in REDUCTIONS:
        raise UnsupportedError(f"reduction={reduction!r}", "there is no such value", nearest(reduction, REDUCTIONS))
    if not 0 <= share <= 1:
        raise UnsupportedError(f"label_smoothing={share}", "it is a share", "0.0 to 1.0, as in PyTorch")
    weight, bias, tokens = head.weight, head.bias, [*hidden.shape[:-1]]
    tokens[:1] = [count * head.shards for count in tokens[:1]]
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, bias {bias if bias is None else bias.shape}"
    fits = hidden.dim() > (head.shards > 1) and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1] > 0
    if not fits or 0 in weight.shape or (bias is not None and bias.shape != weight.shape[:1]):
        instead = "hidden (..., hidden size), weight (vocabulary, hidden size), bias (vocabulary,)"
        raise UnsupportedError(f"a loss of {shapes}", "they do not fit together", instead)
    if not hidden.is_floating_point() or labels.dtype != torch.int64:
        what = f"a loss of hidden {hidden.dtype} and labels {labels.dtype}"
        raise UnsupportedError(what, "labels are numbers of words", "floating-point states, int64 labels")
    if [*labels.shape] != tokens:
        raise UnsupportedError(
            f"labels of shape {tuple(labels.shape)} for hidden {tuple(hidden.shape)}",
            "each token needs one",
            f"labels of shape {tuple(tokens)}" + (" with all tokens of the group first" if head.shards > 1 else ""),
        )
    if head.partition:
        head.vocabulary(head.partition)


def _autocast(*tensors: torch.Tensor | None) -> Any:
    """Return the tensors in autocast's dtype where it is on, as a linear layer does."""
    device = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
