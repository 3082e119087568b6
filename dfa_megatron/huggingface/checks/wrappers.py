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

_EACH_TOKEN = (
    "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA",
    "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
)  # fmt: skip
"""Types of PEFT's adapters that treat each token alone, and alike on every rank: each was compared with one process."""

_ACROSS = (
    *("alora_invocation_tokens", "arrow_config", "monteclora_config", "velora_config"),
    *("boft_dropout", "module_dropout", "rank_dropout"),
)
"""Options by which one of these reads the tokens of this rank, or draws random weights, others on each rank."""


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
    """Refuse PEFT's adapters that may depend on the tokens of a whole sequence.

    Raises:
        UnsupportedError: a model has one; it is named.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        kind = next((f"{kind} with {name}" for name in _ACROSS if getattr(config, name, None)), kind)
        if kind not in _EACH_TOKEN:
            raise UnsupportedError(
                f"PEFT's adapter of type {kind}",
                "it is not known to treat each token alone, and alike on every rank",
                "an adapter that is, such as LORA and IA3 without random weights",
            )


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
