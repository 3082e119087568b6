"""Make the loss of a Megatron language model by tiles of tokens, between its output layer and its loss function.

`tiling` stands in the place of LanguageModule.setup_embeddings_and_output_layer, with which every model ends its
constructor. A model whose config or script asks for no tiles is left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss.deferred import WATCHED, DeferredLogits, Scores, Use, say_tiled
from dfa_megatron.loss.head import Head
from dfa_megatron.megatron.layers.context import context_of
from dfa_megatron.megatron.replace import with_ours
from dfa_megatron.megatron.script.dfa_flags import global_args
from dfa_megatron.megatron.tokens.visit import current_visit


class TiledOutput:
    """Return `DeferredLogits` from an output layer in a call with labels; the first base of its class."""

    dfa_deferring = False

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, Any]:
        """Run ColumnParallelLinear.forward; only logits that nobody gathers are deferred."""
        layer: Any = self
        gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
        ranks = layer.tp_group.size()
        if not self.dfa_deferring or (gathers and ranks > 1):
            return super().forward(input_, weight, runtime_gather_output)  # type: ignore[misc,no-any-return]
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

        return DeferredLogits(run, layer.dfa_tile, rows.shape[0], layer), None


def tile_output(model: Any, tile: int) -> None:
    """Make the loss of a model that has an output layer by tiles of `tile` tokens.

    Raises:
        UnsupportedError: the output layer is not Megatron's ColumnParallelLinear.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    head = model.output_layer
    if type(head) is not ColumnParallelLinear or head.skip_bias_add:
        raise UnsupportedError(
            f"loss_tile with an output layer of class {type(head).__name__}",
            "only the product of Megatron's ColumnParallelLinear is known to be made by tiles",
            "--dfa-loss-tile off",
        )
    base: Any = ColumnParallelLinear
    head.__class__ = with_ours(TiledOutput, base)
    head.dfa_tile = tile
    setattr(head, WATCHED, None)
    model.compute_language_model_loss = MethodType(_loss, model)
    say_tiled(tile)


def tiling(megatrons: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make models tile their loss where their options, or the flags, ask; in setup_embeddings_and_output_layer."""

    def setup(self: Any) -> None:
        megatrons(self)
        context = context_of(self)
        tile = getattr(global_args(), "dfa_loss_tile", "off") if context is None else context.options.loss_tile
        if isinstance(tile, int) and getattr(self, "post_process", False):
            tile_output(self, tile)

    return setup


def _loss(model: Any, labels: torch.Tensor, logits: Any) -> torch.Tensor:
    """Return what LanguageModule.compute_language_model_loss does, (batch, seq); 0 for a negative label."""
    if not isinstance(logits, DeferredLogits):
        dense: torch.Tensor = type(model).compute_language_model_loss(model, labels, logits)
        return dense
    by_token = labels.transpose(0, 1).clamp(min=-1).contiguous()
    losses = logits.losses(by_token, ignore_index=-1).transpose(0, 1).contiguous()
    scores: Scores | None = getattr(model.output_layer, WATCHED)
    if scores is not None and scores.logprobs is not None and scores.entropy is not None:
        visit = current_visit()
        by_row = [x.transpose(0, 1) for x in (scores.logprobs, scores.entropy)]
        scores.logprobs, scores.entropy = by_row if visit is None or not visit.moves else map(visit.leave, by_row)
    return losses


@contextlib.contextmanager
def deferring(model: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Defer the logits of a call with labels, unless code of the caller's reads them."""
    head = getattr(model, "output_layer", None)
    if not isinstance(head, TiledOutput):
        yield
        return
    head.dfa_deferring = given.get("labels") is not None and given.get("output_processor") is None
    try:
        yield
    finally:
        head.dfa_deferring = False
