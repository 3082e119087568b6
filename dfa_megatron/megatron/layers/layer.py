"""A mixin over any Megatron TransformerLayer: rematerialization around the layer, and its rotary table in order.

Shapes: hidden_states (seq / CP [/ TP under sequence parallelism], batch, hidden).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.hybrid.in_order import InOrder
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.latent import order_rotary
from dfa_megatron.megatron.layers.recompute import checkpoint_of, take_over, tile_mlp
from dfa_megatron.megatron.layers.sharing import SharingLayer
from dfa_megatron.megatron.tokens.document_order import DocumentOrder
from dfa_megatron.megatron.tokens.packed_documents import PlacedPack, image_rows, rotary_rows


class DistributedAttentionLayer(SharingLayer):
    """Wrap a layer's forward; the first base of every class that `layer_class` makes.

    - Rematerialization: the layer runs inside Megatron's own checkpoint. The first pass records attention's output and
      lse, and the recompute replays them, so attention and its messages never run twice.
    - Layouts `boundary` and `contiguous`: Megatron's zigzag slice of the rotary table is exchanged once, a multimodal
      one once per micro-batch. In multi-latent attention every layer makes its own table, which is sliced in order.
    - Packed documents, in every layout: each token gets the rotary row of its position in its document. A multimodal
      table follows `position_ids`. The modules in `_dfa_heeds` get the documents, Megatron's arguments do not.
    - A micro-batch with a context-parallel group of its own is shared by that group.
    """

    def __init__(self, config: Any, *args: Any, distributed_attention: AttentionContext, **kwargs: Any) -> None:
        context = distributed_attention
        context.check(config)
        asked = take_over(config, context)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        layer: Any = self
        self._dfa_join(context, layer.pg_collection)
        if (ranks := layer.pg_collection.cp.size()) != config.context_parallel_size:
            raise UnsupportedError(
                f"context_parallel_size={config.context_parallel_size} in the config of a layer whose context-parallel "
                f"group has {ranks} ranks",
                "the layers would mistake the order of the tokens",
                "the same number in both",
            )
        alone = getattr(config, "is_hybrid_model", False) and not context.hybrid
        if alone and ranks > 1 and context.options.data_layout != "zigzag":
            raise UnsupportedError(
                "an attention layer by itself in a hybrid model",
                "the layers beside it rely on Megatron's zigzag order",
                "distribute_attention of the whole hybrid stack spec, or --dfa-data-layout zigzag",
            )
        local_layer = kwargs.get("layer_number", 1)
        self._dfa_remat = context.options.remat == "on" or (asked is not None and asked.covers(local_layer))
        tile_mlp(self, context.options)
        context.say_once(
            "on",
            "dfa: distributed attention over %d context-parallel ranks, layout %s, schedule %s; %s",
            config.context_parallel_size,
            context.options.data_layout,
            context.options.schedule,
            "layers are recomputed without their attention" if self._dfa_remat else "recomputation is left to Megatron",
        )
        core = getattr(layer.self_attention, "core_attention", None)
        if core is not None and not hasattr(core, "dfa_pack"):
            raise UnsupportedError(
                f"a distributed layer whose core_attention became {type(core).__name__}",
                "something replaced it behind distribute_attention, and would mistake the order of the tokens",
                "leaving the spec as it is (attention_backend other than 'local')",
            )
        listening = layer.self_attention if isinstance(layer.self_attention, InOrder) else core
        self._dfa_heeds += [] if listening is None else [listening]
        if core is not None and getattr(layer.config, "multi_latent_attention", False):
            order_rotary(layer.self_attention, context.options.layout_inside)
            self._dfa_heeds.append(layer.self_attention.rotary_pos_emb)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run TransformerLayer.forward, with the same result."""
        if attention_mask is not None:
            raise UnsupportedError(
                "an attention_mask tensor",
                "attention is causal by construction and would ignore the tensor",
                "attention_mask=None, which in Megatron's scripts is --no-create-attention-mask-in-dataloader; "
                "documents are described by packed_seq_params",
            )
        pack = self._dfa_placed(kwargs.pop("packed_seq_params", None), hidden_states)
        rotary_pos_emb = self._dfa_rotary(rotary_pos_emb, pack, self._dfa_tokens(hidden_states))
        kwargs.update(context_mask=context_mask, rotary_pos_emb=rotary_pos_emb)
        return self._dfa_body(hidden_states, context, pack, kwargs)

    def _dfa_rotary(self, table: Any, pack: PlacedPack | None, tokens: int) -> Any:
        """Return the rotary rows of this rank's tokens, of Megatron's table."""
        layer: Any = self
        is_whole = pack is not None and not pack.is_sliced and getattr(layer.config, "mrope_section", None) is None
        if pack is not None and is_whole:
            return rotary_rows(table, pack, tokens, self._dfa_group(), pack.layout(self._dfa.options.layout_inside))
        if self._dfa.options.data_layout == "zigzag" or not (self._dfa_several or self._dfa_own):
            return table
        exchange = self._dfa.relayout(self._dfa_group())
        if pack is not None and isinstance(pack.order, DocumentOrder):
            own = type(layer.self_attention).__module__.startswith("megatron.core.")
            return image_rows(table, pack, exchange, tokens, row_slice=own)
        tables = self._dfa.tables if pack is None or pack.group is None else pack.slices
        return tables.contiguous(table, exchange, tokens)

    def _dfa_body(
        self, hidden_states: torch.Tensor, context: torch.Tensor | None, pack: PlacedPack | None, kwargs: dict[str, Any]
    ) -> Any:
        layer: Any = self

        def body(hidden_states: torch.Tensor, context: torch.Tensor | None) -> Any:
            self._dfa_follow(pack)
            forward = super(DistributedAttentionLayer, layer).forward  # type: ignore[misc]
            return forward(hidden_states, context=context, **kwargs)

        # A re-entrant checkpoint gives the layer's parameters no gradient if the input has none.
        if not (self._dfa_remat and layer.training and torch.is_grad_enabled() and hidden_states.requires_grad):
            return body(hidden_states, context)
        from dfa_megatron.remat import remat_checkpoint

        checkpoint = checkpoint_of(layer.config, layer.tp_group)
        offload = self._dfa.options.remat_offload
        return remat_checkpoint(body, hidden_states, context, checkpoint=checkpoint, offload=offload)


@functools.cache
def layer_class(base: type) -> type:
    """Return the subclass of a TransformerLayer class with `DistributedAttentionLayer` mixed in, made once per base.

    Raises:
        UnsupportedError: base is not a TransformerLayer class.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if issubclass(base, DistributedAttentionLayer):
        return base
    if not issubclass(base, TransformerLayer):
        raise UnsupportedError(
            f"the layer class {base.__name__}",
            "it is not a megatron.core TransformerLayer",
            "a spec of TransformerLayer",
        )
    return type(f"DistributedAttention{base.__name__}", (DistributedAttentionLayer, base), {"__module__": __name__})
