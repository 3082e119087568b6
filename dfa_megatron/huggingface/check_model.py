"""Read from a transformers model the facts that decide whether its attention can be distributed."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dfa_megatron.huggingface.refusals import MODEL

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OWN_MASKS = ("doge",)
"""Types whose layers derive a mask of their own from the one that their model gives them."""

_LOCAL_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest position of the batch, which differs between ranks."""


def check_model(model: Any) -> list[torch.nn.Module]:
    """Return the attention layers of a transformers model that can be distributed.

    Raises:
        UnsupportedError: the model computes something that distributed attention would not; it is named.
    """
    config, kind = model.config.get_text_config(), kind_of(model)
    MODEL.check(
        kind=kind,
        several_parts=config is not model.config,
        encoder_decoder=getattr(config, "is_encoder_decoder", False),
        several_stacks=not hasattr(config, "num_hidden_layers"),
    )
    MODEL.check(
        kind=kind,
        pooling_head=_pooling_head(model),
        other_layers=_other_layers(config),
        own_masks=config.model_type in _OWN_MASKS,
        router_loss=getattr(config, "output_router_logits", False),
        dropout=getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0),
        local_rope=_local_rope(config),
    )
    layers = [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "layer_idx")]
    decoder = model.get_decoder()
    MODEL.check(
        kind=kind,
        not_causal=sum(not layer.is_causal for layer in layers),
        attentions=len(layers),
        layers=config.num_hidden_layers,
        temperature_tuning=any(
            getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope for layer in layers
        ),
        other_decoder=not hasattr(decoder, "config"),
        no_positions="position_ids" not in inspect.signature(type(decoder).forward).parameters,
    )
    return layers


def kind_of(model: Any) -> str:
    """Return the type of a model for messages: "a llama model"."""
    return f"a {model.config.model_type} model"


def _pooling_head(model: Any) -> str:
    """Return the class of a model whose head pools, as those of classifiers and reward models do; "" for others."""
    name = type(model).__name__
    language = model.get_output_embeddings() is not None or name.endswith("ForCausalLM")
    pools = "DoubleHeads" in name  # GPT-2's second head reads one token of each sequence
    return name if model is not model.get_decoder() and (pools or not language) else ""


def _other_layers(config: Any) -> str:
    chunks = ("chunked_attention",) if getattr(config, "attention_chunk_size", None) else ()
    return ", ".join(sorted(set(getattr(config, "layer_types", None) or chunks) - _LAYER_TYPES))


def _local_rope(config: Any) -> str | None:
    """Return the first rotary embedding that depends on the batch; transformers keeps one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = (one.get("rope_type", one.get("type")) for one in sets)
    return next((kind for kind in kinds if kind in _LOCAL_ROPE), None)
