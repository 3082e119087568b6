"""Modules around a model, and adapters in it, that compute from a whole sequence where they are given a rank's part."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError

_PASS_ON = ("torch", "deepspeed", "accelerate", "peft", "dfa_megatron")
"""Packages whose wrappers hand tokens on as they are; PEFT's are known by their adapters."""

_OVER_TOKENS = {
    "ADAPTION_PROMPT": "its layers attend to tokens of their own",
    "SHADOW": "a second stack attends to this rank's part of the tokens alone",
    "XLORA": "it runs the model by itself, to scale its adapters",
}
"""Types of PEFT's adapters that mix tokens, and how."""


def check_wrappers(model: Any, inner: Any) -> None:
    """Refuse modules around a transformers model that would take a part of a sequence for the whole.

    Raises:
        UnsupportedError: one reads the tokens itself, or it holds adapters that do.
    """
    wrapper = model
    while wrapper is not inner:
        holder, child = next((n, x) for n, x in wrapper.named_children() if any(y is inner for y in x.modules()))
        check_adapters(wrapper)
        kind = type(wrapper).__name__
        if type(wrapper).__module__.split(".")[0] not in _PASS_ON and _reads_tokens(wrapper, holder):
            raise UnsupportedError(
                f"a {kind} around a transformers model, which computes from input_ids by itself",
                "it is given this rank's part of the tokens",
                "the transformers model alone, if what is around it treats each token by itself",
            )
        wrapper = child
    check_adapters(inner)


def check_adapters(model: Any) -> None:
    """Refuse PEFT's adapters that depend on the tokens of a whole sequence.

    Raises:
        UnsupportedError: a model has one; it is named.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        why = _OVER_TOKENS.get(kind)
        if getattr(config, "is_prompt_learning", False):
            why = "it adds tokens in front of this rank's part, on every rank"
        elif getattr(config, "alora_invocation_tokens", None) is not None:
            kind, why = "activated LoRA", "it looks for its invocation in this rank's part of the tokens"
        if why:
            asked = f"PEFT's adapter of type {kind}"
            raise UnsupportedError(asked, why, "adapters that treat each token alone, such as LoRA and IA3")


def _reads_tokens(wrapper: torch.nn.Module, holder: str) -> bool:
    """Return whether a wrapper's forward does more with input_ids than to hand it to the model, or to a part of it."""
    forward = inspect.unwrap(type(wrapper).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        code = getattr(forward, "__code__", None)
        return code is not None and "input_ids" in (*code.co_varnames, *code.co_consts)
    handed = {
        id(value.slice if isinstance(value, ast.Subscript) else value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and re.fullmatch(rf"self\.{holder}(\.\w+)*", ast.unparse(call.func))
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
    }
    named = (x for x in ast.walk(tree) if "input_ids" in (getattr(x, "id", None), getattr(x, "value", None)))
    return any(id(node) not in handed for node in named)
