"""Set the attention implementation of a transformers model's language model, and leave that of its towers.

transformers keeps it in the configuration, which models may share with each other and with who made them. So a model
that is distributed gets a copy of its own.
"""

from __future__ import annotations

import copy
from typing import Any

from dfa_megatron.huggingface.current_forward import CONTEXT, NAME, REACHED


def is_multimodal(model: Any) -> bool:
    """Return whether a model has towers beside its language model, so that its configuration has one for the text."""
    return model.config.get_text_config() is not model.config


def kind_of(model: Any) -> str:
    """Return the type of a model for messages: "a llama model"."""
    return f"a {model.config.model_type} model"


def text_field(model: Any) -> str | None:
    """Return the name of the text's configuration in that of a multimodal model; None if it is not a field."""
    config, text = model.config, model.config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)


def attention_of(model: Any) -> str:
    """Return the attention implementation of a model's text."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def is_distributed(model: Any) -> bool:
    """Return whether a model's attention is distributed at present; a user may have set another implementation."""
    return attention_of(model) == NAME and not getattr(model, CONTEXT).local


def distribute(model: Any) -> None:
    """Give a model's text the attention implementation `dfa`, which also serves what is local."""
    if attention_of(model) != NAME:
        model.set_attn_implementation({text_field(model): NAME} if is_multimodal(model) else NAME)


def set_mixers(model: Any, name: str) -> None:
    """Give the mixers of a model an attention implementation whose configuration is not the model's: copied layers."""
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and REACHED in vars(module) and config._attn_implementation != name:
            config._attn_implementation = name


def copy_configs(model: Any, inner: Any) -> str:
    """Give the modules of a model, and those around it, copies of their configurations; return its attention.

    A model made from the configuration of one that is distributed has transformers' default.
    """
    from transformers import PretrainedConfig

    before = attention_of(inner)
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))
    return before if before != NAME else "sdpa" if inner._supports_sdpa else "eager"
