"""Read from a transformers model the facts that decide whether its attention can be distributed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.implementation import is_multimodal, kind_of, text_field
from dfa_megatron.huggingface.positions.embedded_positions import LOCAL_ROPE, rotaries_of
from dfa_megatron.huggingface.recurrent.layers import layers_of, not_called

_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
_STATES = {"linear_attention", "conv"}
_BOTH = {"hybrid", "hybrid_sliding"}
"""Types of layers that have an attention and a state."""
_EACH_TOKEN = {"mlp", "moe"}
"""Types of layers that treat every token alone."""
_OWN_MASKS = ("doge",)
"""Types whose layers derive a mask of their own from the one that their model gives them."""

_CHOOSES = re.compile("Indexer|Compressor")
"""In the names of modules that choose or compress the keys which a token attends to."""


def check_model(model: Any) -> list[torch.nn.Module]:
    """Return the attention layers of a transformers model that can be distributed.

    Raises:
        UnsupportedError: the model computes something that distributed attention would not; it is named.
    """
    _check_stack(model)
    _check_config(model)
    decoder = model.get_decoder()
    within = decoder if is_multimodal(model) else model
    layers = [x for x in within.modules() if hasattr(x, "is_causal") and hasattr(x, "layer_idx")]
    _check_layers(model, decoder, layers)
    _check_positions(model, decoder, layers)
    return layers


def _check_stack(model: Any) -> None:
    """Refuse a model that is no single stack of decoder layers with a head of a language model."""
    config, kind = model.config.get_text_config(), kind_of(model)
    if is_multimodal(model) and (text_field(model) is None or model.get_decoder().config is not config):
        raise UnsupportedError(
            f"{kind}, a multimodal model",
            "its decoder was not found by its configuration of the text",
            "its language model and causal_lm_loss",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{kind}, an encoder and a decoder",
            "its decoder attends to a second sequence, of another length",
            "a causal language model; dfa_megatron.masks.cross_documents for attention between two sequences",
        )
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedError(
            kind, "its config names no number of layers, because it has several stacks", "a model of one stack"
        )
    head = _pooling_head(model)
    if head:
        raise UnsupportedError(
            f"a model of type {head}",
            "its head or its loss reads across tokens of the whole sequence, and a rank has a part of them",
            "a causal language model, or the bare decoder with a head of your own that treats each token alone",
        )


def _check_config(model: Any) -> None:
    """Refuse what a configuration asks for."""
    config, kind = model.config.get_text_config(), kind_of(model)
    others = _other_layers(config)
    if others:
        raise UnsupportedError(
            f"{kind} with layers of type {others}",
            "it is not known how to distribute them",
            "layers of type full_attention, sliding_attention, chunked_attention, linear_attention and conv",
        )
    if config.model_type in _OWN_MASKS:
        raise UnsupportedError(
            kind, "its layers mask tokens by their values", "a model whose layers pass their mask on unchanged"
        )
    if getattr(config, "ple_layer_ids", None):
        raise UnsupportedError(
            f"{kind} with embeddings of n-grams (ple_layer_ids)",
            "they read tokens before this rank's part",
            "no ple_layer_ids",
        )
    dropout = getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0)
    if dropout:
        raise UnsupportedError(
            f"{kind} with attention dropout {dropout}", "the block kernels have no dropout", "attention_dropout=0.0"
        )


def _check_layers(model: Any, decoder: Any, attentions: list[torch.nn.Module]) -> None:
    """Refuse a decoder whose layers mix tokens in other ways than causal attention and states."""
    config, kind = model.config.get_text_config(), kind_of(model)
    indexer = next((type(x).__name__ for x in decoder.modules() if _CHOOSES.search(type(x).__name__)), None)
    if indexer:
        raise UnsupportedError(
            f"{kind} with {indexer} in its layers",
            "it chooses the keys of each token among those of this rank, whatever the layers' type is called",
            "a model whose layers attend to all keys, or to a window of them",
        )
    others, count = sum(not getattr(layer, "is_causal", True) for layer in attentions), len(attentions)
    if others:
        raise UnsupportedError(
            f"{kind} with {count} attentions, {others} of them not causal",
            "a stack of decoder layers sees earlier tokens alone",
            "a model with causal layers",
        )
    types, whole = getattr(config, "layer_types", None), config.num_hidden_layers
    layers: int = whole if types is None else sum(kind not in _STATES | _EACH_TOKEN for kind in types)
    held = max((list(x) for x in decoder.children() if isinstance(x, torch.nn.ModuleList)), key=len, default=[])
    if count != layers and (len({*held}) < len(held) or whole != len(held) > 0):
        raise UnsupportedError(
            f"{kind} of {len(held)} layers, {len({*held})} of them different, whose config names {whole}",
            "layers are compared with its config, one by one",
            "a copy.deepcopy of each layer, and num_hidden_layers, with layer_types, of the config",
        )
    if count != layers:
        raise UnsupportedError(
            f"{kind} with attention in {count} of {layers} layers",
            "other layers mix tokens in ways that are not distributed, or do not take attention implementations",
            "a model with causal self-attention in every layer",
        )
    for layer in decoder.modules():
        if missing := not_called(layer):
            raise UnsupportedError(
                f"{kind} whose {type(layer).__name__} does not call {', '.join(sorted(missing))}",
                "what it calls in place of that computes from the tokens of this rank alone",
                "a version of transformers that `dfa-megatron doctor` names",
            )
    recurrent, states = len(layers_of(decoder)), layers_with_states(config)
    if recurrent < states:
        raise UnsupportedError(
            f"{kind} with {recurrent} layers whose state is distributed, of {states} that have one",
            "the others do not call the functions of convolutions, delta rules and state spaces that are replaced",
            "a model of transformers 5.23 whose layers do",
        )


def _check_positions(model: Any, decoder: Any, attentions: list[torch.nn.Module]) -> None:
    """Refuse a decoder that cannot be told where this rank's part of a sequence begins."""
    kind, rope = kind_of(model), _local_rope(model.config.get_text_config())
    if not hasattr(decoder, "config"):
        raise UnsupportedError(
            kind,
            "its get_decoder() is not its stack of layers, whose inputs are checked",
            "a model whose get_decoder() is its stack",
        )
    if rope and not rotaries_of(decoder):
        raise UnsupportedError(
            f"{kind} with rope_type={rope!r}",
            "its frequencies depend on the longest position in the batch, and its layers embed positions themselves",
            "rope_type 'default', 'linear', 'yarn' or 'llama3'",
        )
    table = getattr(getattr(decoder, "embeddings", None), "position_embeddings", None)
    if hasattr(decoder, "embed_positions") or getattr(table, "padding_idx", None) is not None:
        raise UnsupportedError(
            f"{kind} with a table of positions, as OPT or RoBERTa have",
            "it begins behind rows for padding, and ends at 2,048 tokens or before",
            "a model with rotary embeddings, or position_ids that count from row 0, as GPT-2 has",
        )
    takes = "position_ids" in inspect.signature(type(decoder).forward).parameters
    if attentions and not takes:
        raise UnsupportedError(
            kind,
            "it takes no position_ids, and counts positions in this rank's part",
            "a model that takes position_ids",
        )


def foreign_code(model: torch.nn.Module) -> list[str]:
    """Return the classes of a model's modules, their forwards and hooks that no test has seen, by name, sorted."""
    found = set()
    for module in model.modules():
        classes = [_named(cls) for cls in type(module).__mro__ if not _is_of(cls, (*_COMPARED, *_PYTHONS))]
        found |= {*classes}
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for function in hooks if classes else (module.forward, *hooks):
            code = inspect.unwrap(getattr(function, "func", function))
            if not _is_of(code, (*_COMPARED, *_WRAPPING)):
                found.add(_named(code if hasattr(code, "__qualname__") else type(code)))
    return sorted(found)


_COMPARED = ("transformers", "torch", "dfa_megatron", "peft.tuners")  # those that check_adapters lets pass
_PYTHONS = ("builtins", "abc", "typing", "collections")
_WRAPPING = ("accelerate", "deepspeed", "peft")
"""Packages whose functions run a module's own forward."""


def _is_of(code: Any, packages: tuple[str, ...]) -> bool:
    """Return whether a class or a function is defined in one of these packages."""
    return f"{code.__module__}.".startswith(tuple(f"{name}." for name in packages))


def _named(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _pooling_head(model: Any) -> str:
    """Return the class of a model whose head pools, as those of classifiers and reward models do; "" for others."""
    name = type(model).__name__
    language = model.get_output_embeddings() is not None or name.endswith("ForCausalLM")
    pools = "DoubleHeads" in name  # GPT-2's second head reads one token of each sequence
    return name if model is not model.get_decoder() and (pools or not language) else ""


def _other_layers(config: Any) -> str:
    types = getattr(config, "layer_types", None)
    if types is None:  # a model without types of layers has no chunks in training, but generates with them
        return "chunked_attention" if getattr(config, "attention_chunk_size", None) else ""
    return ", ".join(sorted({*types} - {*_ATTENTIONS, *_STATES, *_BOTH, *_EACH_TOKEN}))


def layers_with_states(config: Any) -> int:
    """Return the number of layers whose type has a state."""
    return sum(kind in _STATES | _BOTH for kind in getattr(config, "layer_types", None) or ())


def _local_rope(config: Any) -> str | None:
    """Return the first type of rotary embedding that depends on the batch; there is one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = (one.get("rope_type", one.get("type")) for one in sets)
    return next((kind for kind in kinds if kind in LOCAL_ROPE), None)
