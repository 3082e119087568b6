"""What a transformers model may ask of attention that would not be honoured: found when the model is prepared."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OWN_MASKS = ("doge",)
"""Types whose layers make a mask of their own out of the one that their model gives them."""

_LOCAL_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest position of the batch, which differs between ranks."""


def check_model(model: Any) -> list[torch.nn.Module]:
    """The attention layers of a transformers model that can be distributed.

    Raises:
        UnsupportedError: names what the model computes that distributed attention would not.
    """
    config = model.config.get_text_config()
    kind = f"a {model.config.model_type} model"
    if config is not model.config:
        raise UnsupportedError(
            kind + " with several parts", "only text is distributed", "its language model and causal_lm_loss"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(kind, "cross-attention is not planned", "a decoder-only model")
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedError(
            kind, "its config names no number of layers, for it has several stacks of them", "a model of one stack"
        )
    _check_head(model)
    _check_config(config, kind)
    layers = [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "layer_idx")]
    _check_layers(layers, config, kind)
    _check_decoder(model.get_decoder(), kind)
    return layers


def _check_layers(layers: list[Any], config: Any, kind: str) -> None:
    """Refuse attention that is not causal, not one in each layer, or that counts its tokens by itself."""
    ahead = sum(not layer.is_causal for layer in layers)
    if ahead:
        raise UnsupportedError(
            f"{kind} with {len(layers)} attentions, {ahead} of them not causal",
            "the plan is causal, and what a decoder's layers look up at an encoder is not planned",
            "a decoder-only model with causal layers",
        )
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedError(
            f"{kind} with attention in {len(layers)} of {config.num_hidden_layers} layers",
            "other layers mix tokens in ways that are not distributed, or do not take attention implementations",
            "a model with causal self-attention in every layer",
        )
    if any(getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope for layer in layers):
        raise UnsupportedError(
            f"{kind} with attn_temperature_tuning",
            "its layers without RoPE scale queries by a token's place in this rank's part, not in the sequence",
            "attn_temperature_tuning=False, or RoPE in every layer (no_rope_layers)",
        )


def _check_decoder(decoder: Any, kind: str) -> None:
    """Refuse a stack of layers that could not be told where its tokens are."""
    if not hasattr(decoder, "config"):
        raise UnsupportedError(
            kind,
            "its get_decoder() is not its stack of layers, whose inputs are checked",
            "one that names its stack so",
        )
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise UnsupportedError(
            kind, "it takes no position_ids, and counts positions in this rank's part", "one that takes position_ids"
        )


def _check_head(model: Any) -> None:
    """Refuse heads that pool, as those of classifiers and reward models do: over this rank's tokens, here."""
    name = type(model).__name__
    language = model.get_output_embeddings() is not None or name.endswith("ForCausalLM")
    pools = "DoubleHeads" in name  # GPT-2's second head reads one token of each sequence
    if model is not model.get_decoder() and (pools or not language):
        raise UnsupportedError(
            f"a model of type {name}",
            "its head or its loss reads across tokens of the whole sequence, and a rank has a part of them",
            "a causal language model, or the bare decoder with a head of your own that takes each token by itself",
        )


def _check_config(config: Any, kind: str) -> None:
    chunks = ("chunked_attention",) if getattr(config, "attention_chunk_size", None) else ()
    others = sorted(set(getattr(config, "layer_types", None) or chunks) - _LAYER_TYPES)
    if others:
        raise UnsupportedError(
            f"{kind} with layers of type {', '.join(others)}",
            "only attention is distributed",
            "layers of type " + " and ".join(sorted(_LAYER_TYPES)),
        )
    if config.model_type in _OWN_MASKS:
        raise UnsupportedError(
            kind, "its layers mask tokens by their values", "a model whose layers hand their mask on as it is"
        )
    check_router(config, kind)
    dropout = getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0)
    if dropout:
        raise UnsupportedError(
            f"{kind} with attention dropout {dropout}", "the block kernels drop nothing", "attention_dropout=0.0"
        )
    for rope in _ropes(config):
        if rope.get("rope_type", rope.get("type")) in _LOCAL_ROPE:
            raise UnsupportedError(
                f"{kind} with rope_type={rope.get('rope_type', rope.get('type'))!r}",
                "its frequencies depend on the longest position in the batch, which each rank would see differently",
                "rope_type 'default', 'linear', 'yarn' or 'llama3'",
            )


def check_router(config: Any, what: str, asked: bool | None = None) -> None:
    """Refuse the loss of a router.

    Args:
        what: would have it, in words.
        asked: of a call, whether it wants that loss; None leaves it to the model's config.

    Raises:
        UnsupportedError: it is wanted.
    """
    if getattr(config, "output_router_logits", False) if asked is None else asked:
        raise UnsupportedError(
            f"{what} with a loss of its router (output_router_logits)",
            "it would balance the experts over this rank's part of a sequence",
            "output_router_logits=False",
        )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Every set of rotary parameters: transformers keeps one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
