"""Find the layers of hybrids that carry a state, and replace the functions that they call while one of them runs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from dfa_megatron.huggingface.current_forward import forward_of
from dfa_megatron.huggingface.recurrent.lightning import lightning
from dfa_megatron.huggingface.recurrent.stand_ins import FUSED, STANDS_IN, Sequence
from dfa_megatron.runtime.agreement.calls import at_layer

_RUNNING: ContextVar[tuple[Sequence | None, ...]] = ContextVar("recurrent layers", default=())
"""What the layers that run compute over, the innermost last; None for a layer whose attention is local."""


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the layers that call one of the functions that can be replaced, or whose forward can be."""
    return [
        module for module in model.modules() if _called(module) & set(STANDS_IN) or type(module).__name__ in FORWARDS
    ]


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Return these layers and the decoder layers around them, which may be the only ones that receive keywords."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inner = {*layers_of(model)}
    return [
        module
        for module in model.modules()
        if module in inner or (isinstance(module, GradientCheckpointingLayer) and inner & {*module.modules()})
    ]


def _called(module: torch.nn.Module) -> set[str]:
    """Return the names that the forward of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names if code is not None else ())


def hook(model: Any) -> None:
    """Hook these layers, which need a `LayerContext` when they run, and replace functions of their modelling files."""
    for layer in layers_of(model):
        layer.register_forward_pre_hook(_enter)
        layer.register_forward_hook(_leave, always_call=True)
        names = vars(sys.modules[type(layer).__module__])
        for name in _called(layer) & {*STANDS_IN, *FUSED}:
            if not hasattr(names[name], _REAL):
                names[name] = _replacing(name, names[name])
        if type(layer).__name__ in FORWARDS and not hasattr(type(layer).forward, _REAL):
            type(layer).forward = _replacing(type(layer).__name__, type(layer).forward)


FORWARDS = {"MiniMaxLightningAttention": lightning}
"""What stands in for the forward of layers that call no function for their states, by their class."""

_REAL = "_dfa_real"
"""The attribute of a replaced function that holds the real one."""


def _replacing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        over = (_RUNNING.get() or (None,))[-1]
        if over is None:
            return real(*args, **kwargs)
        if name in FUSED:
            return None
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.pop("kwargs", None)
        with at_layer(over.layer):
            return {**STANDS_IN, **FORWARDS}[name](real, over, given)

    setattr(replaced, _REAL, real)
    return replaced


def _enter(module: Any, args: tuple[Any, ...]) -> None:
    """Say what a layer computes over."""
    forward = forward_of(module)
    number, context = int(getattr(module, "layer_idx", None) or 0) + 1, forward.context
    where = (context.group, context.options, forward.documents, forward.tree, forward.layout)
    over = Sequence(number, *where) if forward.distributed else None
    _RUNNING.set((*_RUNNING.get(), over))


def _leave(module: Any, args: tuple[Any, ...], output: Any) -> None:
    _RUNNING.set(_RUNNING.get()[:-1])
