"""Replace Megatron's `--recompute-granularity full`: decide which layers run under record and replay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.refusals import LAYERS
from dfa_megatron.remat.by_tiles import by_tiles

_ATTRIBUTE = "_dfa_recompute"
"""Where flags that were taken over stay on the TransformerConfig, for model chunks that are built later."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The flags of Megatron's full recomputation before they were cleared."""

    method: str | None
    num_layers: int | None

    def covers(self, local_layer: int) -> bool:
        """Return whether the flags recompute the local_layer-th layer (from 1) of a model chunk."""
        return self.method != "block" or local_layer <= (self.num_layers or 0)


def take_over(config: Any, context: AttentionContext) -> Recompute | None:
    """Clear full recomputation on the config and return the cleared flags; Megatron reads them in every forward.

    Return None if full recomputation is off. With remat='off' the flags stay. Every call on the same config returns
    the same object, so each layer may call it.

    Raises:
        UnsupportedError: a hybrid model does not support the method, or another model already uses the config.
    """
    own = getattr(config, "heterogeneous_block_specs", False) and not hasattr(config, "get_config_for_layer")
    taken = context.recompute if own else taken_over(config)
    granularity, method = (getattr(config, f"recompute_{name}", None) for name in ("granularity", "method"))
    LAYERS.check(
        context.options,
        config_of_one_layer=own,
        taken_over=taken is not None,
        hybrid_stack=context.hybrid,
        nothing_recomputed=taken is None and granularity != "full",
        recompute_granularity=granularity,
        recompute_method=method,
    )
    if context.options.remat == "off":
        return None
    if granularity != "full":
        return taken
    asked = Recompute(config.recompute_method, config.recompute_num_layers)
    if asked.method == "uniform" and asked.num_layers not in (None, 1):
        context.say_once(
            "uniform",
            "dfa: --recompute-num-layers %s is taken as 1: each layer is recomputed by itself, because attention's "
            "output is kept layer by layer",
            asked.num_layers,
            level=logging.WARNING,
        )
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    setattr(config, _ATTRIBUTE, asked)
    return asked


def taken_over(config: Any) -> Recompute | None:
    """Return the flags of full recomputation that were cleared on a config, None if there were none."""
    return getattr(config, _ATTRIBUTE, None)


def checkpoint_of(config: Any, tp_group: Any) -> Callable[..., Any]:
    """Return Megatron's activation checkpoint as `checkpoint(run, *args)`: Transformer Engine's under fp8 and fp4."""
    from megatron.core import tensor_parallel

    distribute = bool(config.distribute_saved_activations)
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        from megatron.core.extensions.transformer_engine import te_checkpoint

        def with_transformer_engine(run: Callable[..., Any], *args: Any) -> Any:
            return te_checkpoint(run, distribute, tensor_parallel.random.get_cuda_rng_tracker, tp_group, *args)

        return with_transformer_engine

    def with_megatron(run: Callable[..., Any], *args: Any) -> Any:
        return tensor_parallel.checkpoint(run, distribute, *args)

    return with_megatron


def tile_mlp(layer: Any, options: DistAttentionConfig) -> None:
    """Make a layer's MLP compute `mlp_tile` tokens at a time, each tile again in the backward.

    Under sequence parallelism a tile is of this rank's tokens, and every tile has its own collectives.

    Raises:
        UnsupportedError: the layer has experts, or another module in the place of the MLP.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP

    mlp, tile = getattr(layer, "mlp", None), options.mlp_tile
    if not isinstance(tile, int) or mlp is None or isinstance(mlp, IdentityOp):
        return
    LAYERS.check(other_mlp=None if isinstance(mlp, MLP) else type(mlp).__name__)
    whole = mlp.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = max(1, tile // hidden_states.shape[1])  # of (tokens, batch, hidden)
        # Megatron's own MLP draws nothing; an adapter's dropout in it does.
        found = by_tiles(lambda part: whole(part, *args, **kwargs), hidden_states, rows, random=mlp.training)
        return torch.cat([output for output, _ in found]), found[-1][1]

    mlp.forward = forward
