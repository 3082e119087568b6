"""The layers of hybrid stacks beside attention: their mixers run in order, and each layer is recomputed by itself.

In layouts `contiguous` and `boundary` all layers see tokens in order (see in_order.py). In layout `zigzag`
these layers are Megatron's own. Full recomputation is one flag on one config, so this module replaces it for the whole
stack. The layers are checkpointed one by one, as in Megatron's own full recomputation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.hybrid.in_order import OTHER_ORDER, InOrder
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.recompute import checkpoint_of, take_over, tile_mlp
from dfa_megatron.megatron.layers.sharing import SharingLayer

ATTENTION_SLOTS = ("attention_layer", "mla_layer")
"""The submodules of a hybrid stack that hold TransformerLayers with a core_attention."""

MIXERS = {"mamba_layer": "mixer", "gdn_layer": "self_attention"}
"""The submodules of a hybrid stack with a recurrence, and where in them it is."""


class RecomputedLayer(SharingLayer):
    """Run any layer inside Megatron's checkpoint; the first base of every class that `recomputed_class` makes."""

    def __init__(self, config: Any, *args: Any, distributed_attention: AttentionContext, **kwargs: Any) -> None:
        options = distributed_attention.options
        distributed_attention.check(config)
        asked = take_over(config, distributed_attention)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self._dfa_join(distributed_attention, kwargs["pg_collection"])
        self._dfa_recompute = options.remat == "on" or asked is not None
        mixer = mixer_of(self, options)
        self._dfa_mixes = mixer is not None
        self._dfa_heeds += [] if mixer is None else [mixer]
        tile_mlp(self, options)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, with the same result."""
        layer: Any = self
        pack = self._dfa_placed(kwargs.get("packed_seq_params"), hidden_states)
        if self._dfa_mixes:
            kwargs.pop("packed_seq_params", None)

        def body(hidden_states: torch.Tensor) -> Any:
            self._dfa_follow(pack)
            forward = super(RecomputedLayer, layer).forward  # type: ignore[misc]
            return forward(hidden_states, *args, **kwargs)

        wanted = self._dfa_recompute and layer.training and kwargs.get("inference_context") is None
        from dfa_megatron.remat import remat_checkpoint

        # A re-entrant checkpoint gives the layer's parameters no gradient if the input has none.
        if not (wanted and torch.is_grad_enabled() and hidden_states.requires_grad):
            return body(hidden_states)
        checkpoint = checkpoint_of(layer.config, self._dfa_groups.tp)
        return remat_checkpoint(body, hidden_states, checkpoint=checkpoint, offload=self._dfa.options.remat_offload)


def mixer_of(layer: Any, options: DistAttentionConfig) -> InOrder | None:
    """Return the layer's mixer where it runs in order, None where tokens do not meet in the layer.

    Raises:
        UnsupportedError: tokens are in order, and the layer has a mixer that assumes another.
    """
    mixer = getattr(layer, "mixer", getattr(layer, "self_attention", None))
    if isinstance(mixer, InOrder):
        return mixer
    if options.layout_inside == "contiguous" and not isinstance(mixer, (IdentityOp, type(None))):
        raise UnsupportedError(f"the mixer {type(mixer).__name__} where tokens are in order", *OTHER_ORDER)
    return None


@functools.cache
def recomputed_class(base: type) -> type:
    """Return the subclass of a layer class with `RecomputedLayer` mixed in, made once per base."""
    if issubclass(base, RecomputedLayer):
        return base
    return type(f"Recomputed{base.__name__}", (RecomputedLayer, base), {"__module__": __name__})
