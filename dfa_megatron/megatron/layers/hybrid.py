"""Hybrid models (Mamba, MLP, experts and attention in one stack): distribute attention, recompute the other layers.

In layout `contiguous` all layers see tokens in order (see in_order.py). Otherwise the other layers rely on Megatron's
zigzag order, and in layout `boundary` hidden states are exchanged around each attention layer. Full recomputation is
one flag on one config, so this module replaces it for the whole stack. The other layers are checkpointed one by one, as
in Megatron's own full recomputation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.in_order import InOrder
from dfa_megatron.megatron.layers.recompute import checkpoint_of, take_over, tile_mlp
from dfa_megatron.megatron.refusals import LAYERS, OWN_GROUPS, SPEC
from dfa_megatron.megatron.tokens.batch import check_declared
from dfa_megatron.megatron.tokens.packed_documents import place

ATTENTION_SLOTS = ("attention_layer", "mla_layer")
"""The submodules of a hybrid stack that hold TransformerLayers with a core_attention."""

MIXERS = {"mamba_layer": "mixer", "gdn_layer": "self_attention"}
"""The submodules of a hybrid stack with a recurrence, and where in them it is."""


class RecomputedLayer:
    """Run any layer inside Megatron's checkpoint; the first base of every class that `recomputed_class` makes."""

    def __init__(self, config: Any, *args: Any, distributed_attention: AttentionContext, **kwargs: Any) -> None:
        asked = take_over(config, distributed_attention)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self._dfa = distributed_attention
        self._dfa_recompute = distributed_attention.options.remat == "on" or asked is not None
        self._dfa_groups = kwargs["pg_collection"]
        mixer_of(self, distributed_attention.options)  # refuses now; kept here, its parameters would count twice
        tile_mlp(self, distributed_attention.options)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, with the same result."""
        layer: Any = self
        pack, mixer = None, mixer_of(layer, self._dfa.options)
        if mixer is not None:
            packed = kwargs.pop("packed_seq_params", None)
            check_declared(self._dfa_groups.cp, self._dfa.options.data_layout, packed=packed is not None)
            pack = None if packed is None else place(packed)
            OWN_GROUPS.check(hybrid_stack=pack is not None and pack.group is not None)

        def body(hidden_states: torch.Tensor) -> Any:
            if mixer is not None:
                mixer.dfa_pack = pack
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
    mixes = mixer is not None and not isinstance(mixer, IdentityOp)
    LAYERS.check(other_mixer=type(mixer).__name__ if mixes and options.data_layout == "contiguous" else None)
    return None


@functools.cache
def recomputed_class(base: type) -> type:
    """Return the subclass of a layer class with `RecomputedLayer` mixed in, made once per base."""
    if issubclass(base, RecomputedLayer):
        return base
    return type(f"Recomputed{base.__name__}", (RecomputedLayer, base), {"__module__": __name__})


def is_stack(spec: Any) -> bool:
    """Return whether a spec is for a HybridStack (called MambaStack up to Megatron-Core 0.17)."""
    submodules = getattr(spec, "submodules", None)
    return hasattr(submodules, "attention_layer") and hasattr(submodules, "mamba_layer")


def default_stack_spec() -> Any:
    """Return Megatron's own hybrid_stack_spec (called mamba_stack_spec up to 0.17).

    Raises:
        UnsupportedError: the spec needs a package that is not installed (Transformer Engine, mamba-ssm, Triton).
    """
    try:
        try:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("megatron"):
                raise
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    except ImportError as error:
        SPEC.check(stack_error=error)
    return spec
