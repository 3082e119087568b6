"""Hook the layers of a model, and their mixers: attention and layers with states, which compute from several tokens.

A layer, or a mixer, that is checkpointed runs again in the backward. It finds its `Forward` in a closure of
transformers' checkpoint functions (checkpointing.py), and elsewhere in its keyword, which it then enters.
A mixer that runs in a distributed forward must reach every function of ours that its class lists. One that does not has
computed from this rank's tokens alone: its forward raises.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.call_checks import takes
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    KEYWORD,
    NAME,
    REACHED,
    Handed,
    LayerContext,
    end,
    enter,
    forward_of_context,
)
from dfa_megatron.huggingface.implementation import attention_of, set_mixers
from dfa_megatron.huggingface.recurrent import layers as recurrent


def adopt(model: Any, context: LayerContext, attentions: list[torch.nn.Module]) -> None:
    """Give the layers of a model and their mixers, its attentions among them, its context, hooks and implementation."""
    decoder = model.get_decoder()
    recurrents = recurrent.modules_of(decoder)
    for mixer in {*attentions, *recurrents}:
        if REACHED not in vars(mixer):
            recurrent.hook(mixer)
            wanted = {NAME} if mixer in attentions else recurrent.listed(mixer)
            mixer.register_forward_hook(functools.partial(_check_reached, frozenset(wanted)))
        recurrent.replace_calls(mixer)
        vars(mixer)[REACHED] = set()
    for module in {*_layers(decoder), *attentions, *recurrents}:
        _hook(module)
    for module in {*_parts(decoder), *attentions, *recurrents}:
        setattr(module, CONTEXT, context)
    set_mixers(model, attention_of(model))


def _hook(layer: Any) -> None:
    """Let a layer or a mixer that runs again enter its forward; once."""
    if not any(hook is _enter_again for hook in layer._forward_pre_hooks.values()):
        layer.register_forward_pre_hook(_enter_again, with_kwargs=True, prepend=True)
        layer.register_forward_hook(end, always_call=True)


def knows_all(model: Any, context: LayerContext) -> bool:
    """Return whether every layer of a model is one that `adopt` saw: none was copied, added or replaced since."""
    return all(vars(module).get(CONTEXT) is context for module in _parts(model.get_decoder()))


def _layers(decoder: Any) -> list[torch.nn.Module]:
    """Return the layers of a decoder."""
    return [x for child in decoder.children() if isinstance(child, torch.nn.ModuleList) for x in child]


def _parts(decoder: Any) -> list[torch.nn.Module]:
    """Return the layers of a decoder and their children."""
    return [part for layer in _layers(decoder) for part in (layer, *layer.children())]


def _enter_again(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enter the forward of a layer that runs again in the backward, which its keyword holds.

    Raises:
        UnsupportedError: nothing tells which it was.
    """
    handed: Handed | None = kwargs.get(KEYWORD)
    mixes = REACHED in vars(layer)
    if mixes:
        vars(layer)[REACHED] = set()
    backward = torch._C._current_graph_task_id() != -1  # in which a layer that runs was checkpointed
    if backward and forward_of_context(getattr(layer, CONTEXT)) is None:
        if handed is not None:
            enter(layer, handed.forward)
        elif mixes and getattr(getattr(layer, "config", None), "_attn_implementation", NAME) == NAME:
            raise UnsupportedError(
                f"a layer of type {type(layer).__name__} that runs again in the backward",
                "the function that checkpoints it does not tell it the documents, or whether its attention was local",
                "checkpoint='full' or 'remat' of TrainingConfig, or gradient_checkpointing_enable, which do",
            )
    if handed is None or takes(layer, KEYWORD):
        return None
    return args, {name: value for name, value in kwargs.items() if name != KEYWORD}


def _check_reached(wanted: frozenset[str], mixer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise where a mixer has run in a distributed forward without reaching each of these functions.

    Raises:
        UnsupportedError: names the mixer and the functions.
    """
    forward = forward_of_context(getattr(mixer, CONTEXT))
    if forward is not None and forward.distributed and (missed := wanted - getattr(mixer, REACHED)):
        raise UnsupportedError(
            f"a layer of type {type(mixer).__name__} that did not reach {', '.join(sorted(missed))}",
            "it has computed from the tokens of this rank alone",
            "distribute_attention once more, after layers were changed, and versions that `dfa-megatron doctor` names",
        )
