"""Find the layers of hybrids that carry a state, and replace the functions that they call while one of them runs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.hooks import replace
from dfa_megatron.huggingface.current_forward import REACHED, Forward, end, enter, forward_of, innermost
from dfa_megatron.huggingface.recurrent.stand_ins import CLASSES, FUSED, STANDS_IN
from dfa_megatron.runtime.agreement.calls import at_layer


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the layers that call one of the functions that can be replaced."""
    return [module for module in model.modules() if _called(module) & set(STANDS_IN)]


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Return these layers and the decoder layers around them, which may be the only ones that receive keywords."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inner = {*layers_of(model)}
    return [
        module
        for module in model.modules()
        if module in inner or (isinstance(module, GradientCheckpointingLayer) and inner & {*module.modules()})
    ]


def _called(module: Any) -> set[str]:
    """Return the names that the forward of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names if code is not None else ())


def listed(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that the class of a known layer with a state must call; none for other modules."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return frozenset(name for calls, classes in CLASSES.items() if names & {*classes.split()} for name in calls)


def not_called(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that the class of a known layer lists, and its forward does not use."""
    return listed(module) - _called(module)


def hook(layer: torch.nn.Module) -> None:
    """Hook a layer with a state, which needs a `LayerContext` when it runs."""
    if layer in layers_of(layer):
        layer.register_forward_pre_hook(_enter)
        layer.register_forward_hook(end, always_call=True)


def replace_calls(layer: torch.nn.Module) -> None:
    """Replace what a layer with a state calls in its file; nothing changes at a second call."""
    home = sys.modules[type(layer).__module__]
    for name in _called(layer) & {*STANDS_IN, *FUSED}:
        if not hasattr(real := vars(home)[name], _REAL):
            replace(home, name, _replacing(name, real))


_REAL = "_dfa_real"
"""The attribute of a replaced function that holds the real one."""


def _replacing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        layer, forward = innermost() or (None, None)
        if forward is None or not forward.distributed or name not in _called(layer):
            return real(*args, **kwargs)
        if name in FUSED:
            return None
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.pop("kwargs", None)
        vars(layer)[REACHED].add(name)
        with at_layer(int(getattr(layer, "layer_idx", None) or 0) + 1):
            return STANDS_IN[name](real, options_of(forward), given)

    setattr(replaced, _REAL, real)
    return replaced


def _enter(layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Let the functions that a layer calls find that they are called in it, and its forward."""
    enter(layer, forward_of(layer))


def options_of(forward: Forward) -> dict[str, Any]:
    """Return the options of a recurrence over the rows of a forward: their documents, or the segments of a tree."""
    context, tree = forward.context, forward.tree
    options: dict[str, Any] = {"group": context.group, "layout": forward.layout, "config": context.options}
    if tree is not None:
        return options | {"cu_seqlens": (0, *(span.hi for span in tree.spans)), "parents": tree.parents}
    return options | {"cu_seqlens": forward.documents}
