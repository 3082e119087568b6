"""Make the loss of a transformers model by tiles of tokens, between its head and its loss function.

In a call with labels the head returns `DeferredLogits` without running. The loss function runs it, and it makes the
losses. So hooks that gather the weight (ZeRO 3, FSDP) run around the work, in the forward and the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.batch import next_labels
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext, innermost, reach
from dfa_megatron.loss.deferred import WATCHED, DeferredLogits, Use, say_tiled
from dfa_megatron.loss.head import Head
from dfa_megatron.loss.scores import IGNORED


class TiledLinear:
    """Defer the logits of a linear layer, or give its hidden states and weight to a function.

    The first base of a `_tiled_class`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or defer its logits; then hooks run once, around the call that makes the losses.

        With two runs FSDP would free the weights of a group, such as the last norm and the head, between them.
        """
        layer: Any = self
        call = innermost()
        if call is None or call.forward.tile is None or "dfa_use" in kwargs:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return DeferredLogits(functools.partial(run_in, layer, *args), call.forward.tile, layer.out_features, layer)

    def forward(self, hidden: torch.Tensor, dfa_use: Callable[[torch.Tensor, Any], Any] | None = None) -> Any:
        """Run the layer's own forward, or a function in its place."""
        return super().forward(hidden) if dfa_use is None else dfa_use(hidden, self)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the base, which is found by its name; a class of both has no name of its own."""
        return (_empty, type(self).__bases__[1:], *super().__reduce_ex__(protocol)[2:])


@functools.cache
def _tiled_class(base: type) -> type:
    """Return the class of both, made once, for a linear layer to get in place of its own."""
    return type(f"Tiled{base.__name__}", (TiledLinear, base), {"__module__": __name__})


def _empty(base: type) -> Any:
    made: Any = _tiled_class(base)
    return made.__new__(made)


def run_in(layer: Any, hidden: torch.Tensor, use: Use, scale: float, softcap: float | None) -> Any:
    """Give a function the hidden states and the weight of a tiled layer, within a call of that layer."""

    def inside(hidden: torch.Tensor, layer: Any) -> Any:
        return use(hidden, Head(weight=layer.weight, bias=layer.bias, scale=scale, softcap=softcap))

    return layer(hidden, dfa_use=inside)


def tiled_head(head: Any) -> Any:
    """Return the same linear layer, which can then make losses by tiles; its own forward stays as it was."""
    replaced = "forward" in vars(head) and not hasattr(head, "_hf_hook")  # accelerate's passes on what it is given
    if replaced or type(head).forward not in (torch.nn.Linear.forward, TiledLinear.forward):
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        raise UnsupportedError(
            f"a loss by tiles with a head of type {kind}{' and a forward of its own' * replaced}",
            "only the product of PyTorch's linear layer is known to be made by tiles",
            "loss_tile='off' and causal_lm_loss, or a head without an adapter and tensor parallelism",
        )
    if not isinstance(head, TiledLinear):
        base: Any = type(head)
        head.__class__ = _tiled_class(base)
        setattr(head, WATCHED, None)
    return head


def set_tile(model: Any, options: TrainingConfig) -> None:
    """Let the model's own loss be made by tiles, but for loss_tile="off"."""
    if options.loss_tile == "off":
        return
    own = getattr(model, "loss_function", None)
    if not is_causal(own):
        raise UnsupportedError(
            f"loss_tile with the loss function {getattr(own, '__name__', own)}",
            "only transformers' ForCausalLMLoss is known to be made by tiles",
            "loss_tile='off', or dfa_megatron.loss.cross_entropy on hidden states",
        )
    tiled_head(model.get_output_embeddings())
    say_tiled(options.loss_tile)
    if not isinstance(own, functools.partial):  # which smooths labels
        model.loss_function = causal_loss


def is_causal(function: Any) -> bool:
    """Return whether a loss function is transformers' ForCausalLMLoss, or ours in its place, not one under its name."""
    from transformers.loss import loss_utils

    theirs = getattr(function, "__globals__", None) is vars(loss_utils) and function.__name__ == "ForCausalLMLoss"
    return theirs or getattr(function, "func", function) is causal_loss


def causal_loss(
    logits: Any,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """Return what transformers' ForCausalLMLoss does, by tiles where logits are deferred, and with smoothed labels.

    By tiles it is 0 in training without a label that counts.
    """
    reach(causal_loss.__name__)
    if shift_labels is None:
        assert labels is not None
        shift_labels = next_labels(labels, ignore_index)
    total = summed_loss(logits, shift_labels, ignore_index, label_smoothing)
    if num_items_in_batch is None:
        count = (shift_labels != ignore_index).sum()
        return total / (count.clamp(min=1) if torch.is_grad_enabled() else count)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def summed_loss(logits: Any, labels: torch.Tensor, ignored: int, smoothing: float) -> torch.Tensor:
    """Return the summed cross-entropy of tokens, by tiles where logits are deferred; in float32, or float64 for it."""
    if isinstance(logits, DeferredLogits):
        return logits.losses(labels, ignored, smoothing).sum()
    scores = logits.flatten(0, -2)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    labels = labels.flatten().to(scores.device)
    return F.cross_entropy(scores, labels, ignore_index=ignored, reduction="sum", label_smoothing=smoothing)


def tile_of(model: Any, given: dict[str, Any]) -> int | None:
    """Return the tokens of a tile for the loss of a call, None for one whose logits are made."""
    context: LayerContext = getattr(model, CONTEXT)
    tile = context.options.loss_tile
    if isinstance(tile, str) or given.get("labels") is None or (not model.training and context.reads_logits):
        return None
    tiled_head(model.get_output_embeddings())
    return tile
