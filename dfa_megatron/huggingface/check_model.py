"""Refuse a transformers model that no test compared with one process: the list of what was tried.

`make models` writes the list: types of models, each with its types of layers. What a user sets on a listed type is
checked here: dropout, RoPE, layers that were copied.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.embedded_positions import LOCAL_ROPE, rotaries_of
from dfa_megatron.huggingface.implementation import is_multimodal, kind_of
from dfa_megatron.huggingface.recurrent.layers import not_called
from dfa_megatron.huggingface.tried import TRIED

_WITHOUT = {"linear_attention", "conv", "mlp", "moe"}
"""Types of layers without an attention."""


def check_model(model: Any, *, unlisted: bool) -> list[torch.nn.Module]:
    """Return the attention layers of a transformers model that can be distributed.

    unlisted: the model need not be on the list.

    Raises:
        UnsupportedError: the model is not on the list, or a user has set what distributed attention does not compute.
    """
    if strange := _unlisted(model):
        if not unlisted:
            raise UnsupportedError(
                f"{kind_of(model)} with {strange}",
                "no test compared that with one process",
                "unlisted=True, and then dfa_megatron.huggingface.prove(model), which compares it; or what "
                "docs/huggingface.md lists",
            )
        _warn(f"{kind_of(model)} with {strange}: compare it with one process, by dfa_megatron.huggingface.prove(model)")
    for name in patched(model):
        _warn(
            f"{name} is not of transformers itself, so it was never compared with one rank: what it computes from "
            "several tokens at once sees those of one rank alone. dfa_megatron.huggingface.prove(model) compares it"
        )
    decoder = model.get_decoder()
    within = decoder if is_multimodal(model) else model
    layers = [x for x in within.modules() if hasattr(x, "is_causal") and hasattr(x, "layer_idx")]
    _check_config(model, decoder)
    _check_layers(model, decoder, layers)
    return layers


_warn = functools.cache(logging.getLogger(__name__).warning)


def _unlisted(model: Any) -> str:
    """Return what of a model is not on the list: its type, its class, types of layers or classes in it; or ""."""
    kind, name = model.config.model_type, type(model).__name__
    if kind not in TRIED:
        return f"a type, {kind}, that is not on the list"
    language = model.get_output_embeddings() is not None or name.endswith("ForCausalLM")
    if model is not model.get_decoder() and ("DoubleHeads" in name or not language):
        return f"a class, {name}, whose head or loss may read several tokens"
    layers = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - TRIED[kind] - {"full_attention"}
    if layers:
        return f"layers of type {', '.join(sorted(layers))}"
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    others = sorted(_named(cls) for cls in classes if not _is_of(cls, _CLASSES))
    return f"modules of {', '.join(others)}" if others else ""


def _check_config(model: Any, decoder: Any) -> None:
    """Refuse what a user may set in the configuration of a listed type."""
    config, kind = model.config.get_text_config(), kind_of(model)
    dropout = getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0)
    if dropout:
        raise UnsupportedError(
            f"{kind} with attention dropout {dropout}", "the block kernels have no dropout", "attention_dropout=0.0"
        )
    rope = _local_rope(config)
    if rope and not rotaries_of(decoder):
        raise UnsupportedError(
            f"{kind} with rope_type={rope!r}",
            "its frequencies depend on the longest position in the batch, and its layers embed positions themselves",
            "rope_type 'default', 'linear', 'yarn' or 'llama3'",
        )


def _check_layers(model: Any, decoder: Any, attentions: list[torch.nn.Module]) -> None:
    """Refuse layers that were copied without their config, and layers that do not call what is replaced."""
    config, kind = model.config.get_text_config(), kind_of(model)
    types, whole = getattr(config, "layer_types", None), getattr(config, "num_hidden_layers", 0)
    layers: int = whole if types is None else sum(kind not in _WITHOUT for kind in types)
    held = max((list(x) for x in decoder.children() if isinstance(x, torch.nn.ModuleList)), key=len, default=[])
    if len(attentions) != layers:
        raise UnsupportedError(
            f"{kind} with {len(attentions)} attentions in {len(held)} layers, {len({*held})} of them different, whose "
            f"config names {whole} layers, {layers} of them with attention",
            "layers are compared with its config, one by one",
            "a copy.deepcopy of each layer, and num_hidden_layers, with layer_types, of the config",
        )
    for layer in decoder.modules():
        if missing := not_called(layer):
            raise UnsupportedError(
                f"{kind} whose {type(layer).__name__} does not call {', '.join(sorted(missing))}",
                "what it calls in place of that computes from the tokens of this rank alone",
                "a version of transformers that `dfa-megatron doctor` names",
            )


def patched(model: torch.nn.Module) -> list[str]:
    """Return the forwards and hooks of a model's modules that are not of transformers, by name, sorted."""
    found = set()
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        listed = all(_is_of(cls, _CLASSES) for cls in type(module).__mro__)
        for function in (module.forward, *hooks) if listed else hooks:
            code = inspect.unwrap(getattr(function, "func", function))
            if not _is_of(code, (*_COMPARED, *_WRAPPING)):
                found.add(_named(code if hasattr(code, "__qualname__") else type(code)))
    return sorted(found)


_COMPARED = ("transformers", "torch", "dfa_megatron", "peft.tuners", "peft.utils")
"""Packages whose code is known; of PEFT's what `check_adapters` lets pass."""
_CLASSES = (*_COMPARED, "builtins", "abc", "typing", "collections")
"""Packages of the classes that modules may have, and their bases."""
_WRAPPING = ("accelerate", "deepspeed", "peft")
"""Packages whose functions run a module's own forward."""


def _is_of(code: Any, packages: tuple[str, ...]) -> bool:
    """Return whether a class or a function is defined in one of these packages."""
    return f"{code.__module__}.".startswith(tuple(f"{name}." for name in packages))


def _named(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _local_rope(config: Any) -> str | None:
    """Return the first type of rotary embedding that depends on the batch; there is one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = (one.get("rope_type", one.get("type")) for one in sets)
    return next((kind for kind in kinds if kind in LOCAL_ROPE), None)
