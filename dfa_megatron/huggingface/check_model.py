"""Read from a transformers model the facts that decide whether its attention can be distributed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from dfa_megatron.huggingface.parts.text_part import has_parts, part_of
from dfa_megatron.huggingface.positions.own_positions import LOCAL_ROPE, rotaries_of, table_of
from dfa_megatron.huggingface.recurrent.layers import layers_of
from dfa_megatron.huggingface.refusals import MODEL

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

_AT_ENCODER = ("encoder_attn", "crossattention")
"""Names of a decoder layer's attention at an encoder; without an encoder's states it does not run."""


def check_model(model: Any) -> list[torch.nn.Module]:
    """Return the attention layers of a transformers model that can be distributed, with those at an encoder.

    Raises:
        UnsupportedError: the model computes something that distributed attention would not; it is named.
    """
    config, kind = model.config.get_text_config(), kind_of(model)
    MODEL.check(
        kind=kind,
        several_parts=has_parts(model) and (part_of(model) is None or model.get_decoder().config is not config),
        encoder_decoder=getattr(config, "is_encoder_decoder", False),
        several_stacks=not hasattr(config, "num_hidden_layers"),
    )
    MODEL.check(
        kind=kind,
        pooling_head=_pooling_head(model),
        other_layers=_other_layers(config),
        own_masks=config.model_type in _OWN_MASKS,
        ngrams=bool(getattr(config, "ple_layer_ids", None)),
        router_loss=getattr(config, "output_router_logits", False),
        dropout=getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0),
    )
    decoder = model.get_decoder()
    within = decoder if has_parts(model) else model
    named = {n: x for n, x in within.named_modules() if hasattr(x, "is_causal") and hasattr(x, "layer_idx")}
    layers = [module for name, module in named.items() if name.split(".")[-1] not in _AT_ENCODER]
    MODEL.check(
        kind=kind,
        not_causal=sum(not getattr(layer, "is_causal", True) for layer in layers),
        attentions=len(layers),
        layers=_count(config, _STATES | _EACH_TOKEN),
        recurrent=len(layers_of(decoder)),
        states=layers_with_states(config),
        chooses_keys=next((type(x).__name__ for x in decoder.modules() if _CHOOSES.search(type(x).__name__)), None),
        other_decoder=not hasattr(decoder, "config"),
        local_rope=_local_rope(config) if not rotaries_of(decoder) else None,
        no_positions=layers
        and "position_ids" not in inspect.signature(type(decoder).forward).parameters
        and table_of(decoder) is None,
    )
    return list(named.values())


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


_COMPARED = ("transformers", "torch", "dfa_megatron", "peft.tuners.lora", "peft.tuners.ia3", "peft.tuners.tuners_utils")
_PYTHONS = ("builtins", "abc", "typing", "collections")
_WRAPPING = ("accelerate", "deepspeed", "peft")
"""Packages whose functions run a module's own forward."""


def _is_of(code: Any, packages: tuple[str, ...]) -> bool:
    """Return whether a class or a function is defined in one of these packages."""
    return f"{code.__module__}.".startswith(tuple(f"{name}." for name in packages))


def _named(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


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
    types = getattr(config, "layer_types", None)
    if types is None:  # a model without types of layers has no chunks in training, but generates with them
        return "chunked_attention" if getattr(config, "attention_chunk_size", None) else ""
    return ", ".join(sorted({*types} - {*_ATTENTIONS, *_STATES, *_BOTH, *_EACH_TOKEN}))


def layers_with_states(config: Any) -> int:
    """Return the number of layers whose type has a state."""
    return sum(kind in _STATES | _BOTH for kind in getattr(config, "layer_types", None) or ())


def _count(config: Any, others: set[str]) -> int:
    """Return the number of layers whose type is none of these."""
    types = getattr(config, "layer_types", None)
    if types is None:
        count: int = getattr(config, "decoder_layers", config.num_hidden_layers)
        return count
    return sum(kind not in others for kind in types)


def _local_rope(config: Any) -> str | None:
    """Return the first type of rotary embedding that depends on the batch; there is one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = (one.get("rope_type", one.get("type")) for one in sets)
    return next((kind for kind in kinds if kind in LOCAL_ROPE), None)
