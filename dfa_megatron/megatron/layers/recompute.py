"""Replace Megatron's `--recompute-granularity full`: decide which layers save attention's output and take it later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.context import AttentionContext

_FLAGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""The fields of a TransformerConfig that ask for recomputation."""


def takes_over(config: Any, context: AttentionContext, local_layer: int) -> bool | None:
    """Return whether Megatron's flags of full recomputation cover the local_layer-th layer (from 1) of a model chunk.

    None: they are off, or left to Megatron by checkpoint='none'. `hide_flags` hides them from the blocks.

    Raises:
        UnsupportedError: a hybrid model does not support the method.
    """
    granularity, method, layers = (vars(config).get(name) for name in _FLAGS)
    if granularity != "full" or not context.options.saves_attention:
        return None
    if context.hybrid and method == "block":
        raise UnsupportedError(
            "recompute_method='block' in a hybrid model",
            "not every layer of its stack knows its place in the pipeline stage",
            "--recompute-method uniform --recompute-num-layers 1",
        )
    return method != "block" or local_layer <= (layers or 0)


def hide_flags(block: Any) -> None:
    """Give a block, which reads the flags in every forward, a view of its config without them.

    The view has the same fields, later changes included. A model keeps the config itself, to which scripts add
    functions, and of which other models may be built.
    """
    base: Any = type(block.config)
    view: Any = object.__new__(_view_class(base))
    view.__dict__ = vars(block.config)
    block.config = view


@functools.cache
def _view_class(base: type) -> type:
    def hidden(name: str) -> property:
        return property(lambda view: None, lambda view, value: vars(view).update({name: value}))

    return type(base.__name__, (base,), {"__module__": __name__, **{name: hidden(name) for name in _FLAGS}})


def checkpoint_of(config: Any, tp_group: Any) -> Callable[..., Any]:
    """Return Megatron's activation checkpoint as `checkpoint(run, *args)`: Transformer Engine's under fp8 and fp4."""
    from megatron.core import tensor_parallel

    distribute = bool(config.distribute_saved_activations)
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        from megatron.core.extensions.transformer_engine import te_checkpoint

        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return lambda run, *args: te_checkpoint(run, distribute, tracker, tp_group, *args)
    return lambda run, *args: tensor_parallel.checkpoint(run, distribute, *args)
