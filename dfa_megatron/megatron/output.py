"""Make the loss of a Megatron language model by tiles of tokens, between its output layer and its loss function.

In a call with labels the output layer returns `DeferredLogits`. A model whose config or script asks for no tiles is
left as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.loss.deferred import WATCHED, DeferredLogits, Scores, Use, say_tiled
from dfa_megatron.loss.head import Head
from dfa_megatron.megatron.layers.context import context_of
from dfa_megatron.megatron.script.dfa_flags import global_args
from dfa_megatron.megatron.tokens.visit import current_visit


def tile_of(model: Any) -> int | None:
    """Return the tokens of a tile; None for a model that has no loss, or makes it of all logits."""
    context = context_of(model)
    tile = getattr(global_args(), "dfa_loss_tile", "off") if context is None else context.options.loss_tile
    return tile if isinstance(tile, int) and getattr(model, "post_process", False) else None


def _scores(model: Any) -> Scores | None:
    if tile_of(model) is None:
        raise AttributeError(WATCHED)
    return vars(model).get(WATCHED)  # type: ignore[no-any-return]


scores = property(_scores, lambda model, found: vars(model).update({WATCHED: found}))
"""What `scores_of` reads of a LanguageModule whose loss is made by tiles; others do not have it."""


@contextlib.contextmanager
def deferring(model: Any, tile: int | None, given: Mapping[str, Any]) -> Iterator[None]:
    """Defer the logits of a call with labels, unless code of the caller's reads them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if tile is None or given.get("labels") is None or given.get("output_processor") is not None:
        yield
        return
    head = model.output_layer
    if type(head) is not ColumnParallelLinear or head.skip_bias_add:
        raise UnsupportedError(
            f"loss_tile with an output layer of class {type(head).__name__}",
            "only the product of Megatron's ColumnParallelLinear is known to be made by tiles",
            "--dfa-loss-tile off",
        )
    say_tiled(tile)
    by_tiles = for_a_while(head, forward=functools.partial(_forward, head, model, tile))
    with by_tiles, for_a_while(model, compute_language_model_loss=functools.partial(_loss, model)):
        yield


def _forward(
    layer: Any,
    model: Any,
    tile: int,
    input_: torch.Tensor,
    weight: torch.Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Any, Any]:
    """Run ColumnParallelLinear.forward; only logits that nobody gathers are deferred."""
    ranks = layer.tp_group.size()
    if ranks > 1 and (layer.gather_output if runtime_gather_output is None else runtime_gather_output):
        return type(layer).forward(layer, input_, weight, runtime_gather_output)  # type: ignore[no-any-return]
    rows = layer.weight if weight is None else weight

    def run(use: Use, scale: float, softcap: float | None) -> Any:
        head = Head(
            weight=rows,
            bias=layer.bias,
            scale=scale,
            softcap=softcap,
            group=layer.tp_group if ranks > 1 else None,
            sequence_parallel=layer.sequence_parallel,
            partition=(rows.shape[0],) * ranks,
        )
        return use(input_, head)

    return DeferredLogits(run, tile, rows.shape[0], model), None


def _loss(model: Any, labels: torch.Tensor, logits: Any) -> torch.Tensor:
    """Return what LanguageModule.compute_language_model_loss does, (batch, seq); 0 for a negative label."""
    if not isinstance(logits, DeferredLogits):
        dense: torch.Tensor = type(model).compute_language_model_loss(model, labels, logits)
        return dense
    by_token = labels.transpose(0, 1).clamp(min=-1).contiguous()
    losses = logits.losses(by_token, ignore_index=-1).transpose(0, 1).contiguous()
    found: Scores | None = getattr(model, WATCHED)
    if found is not None and found.logprobs is not None and found.entropy is not None:
        visit = current_visit()
        by_row = [x.transpose(0, 1) for x in (found.logprobs, found.entropy)]
        found.logprobs, found.entropy = by_row if visit is None or not visit.moves else map(visit.leave, by_row)
    return losses
