"""Find the language model of a model of several parts, and set the attention of that part alone.

transformers keeps the attention of a model in its configuration, which models may share with each other and with who
made them. So a model that is distributed gets a copy of its own.
"""

from __future__ import annotations

import copy
from typing import Any

from dfa_megatron.huggingface.attention_function import NAME
from dfa_megatron.huggingface.layer_context import CONTEXT


def has_parts(model: Any) -> bool:
    """Return whether a model has parts beside its language model, so that its configuration has one for the text."""
    return model.config.get_text_config() is not model.config


def part_of(model: Any) -> str | None:
    """Return the name of the text's configuration in that of a model of several parts; None if it is not a field."""
    config, text = model.config, model.config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)


def attention_of(model: Any) -> str:
    """Return the attention implementation of a model's text."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def is_distributed(model: Any) -> bool:
    """Return whether a model's attention is distributed at present."""
    return attention_of(model) == NAME


def set_attention(model: Any, name: str) -> None:
    """Give a model's text an attention implementation, and leave that of its towers."""
    model.set_attn_implementation({part_of(model): name} if has_parts(model) else name)


def switch_attention(model: Any, name: str) -> None:
    """Switch a distributed model's attention to another implementation and back, where it is not set already."""
    if attention_of(model) != name:
        getattr(model, CONTEXT).current.switched = True
        set_attention(model, name)


def _former(model: Any) -> str:
    """Return the attention of a model that is not distributed yet; one made from the configuration of one that is has
    transformers' default.
    """
    name = attention_of(model)
    return name if name != NAME else "sdpa" if model._supports_sdpa else "eager"


def own_configs(model: Any, inner: Any) -> str:
    """Give the modules of a model, and those around it, copies of their configurations; return its attention."""
    from transformers import PretrainedConfig

    before = _former(inner)
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))
    return before
