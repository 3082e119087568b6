"""Hook the mixers of a model: attention and layers with states, which compute from several tokens.

    a mixer runs                    _enter: in the forward that runs, or that the recompute of its layer has entered
      attention                     attention_function.py
      causal_conv1d_fn, ...         in its file, replaced by what stands in for it over the ranks
    it ends                         _check_reached, leave

A mixer that runs in a distributed forward must reach every function of ours that its class lists. One that does not has
computed from this rank's tokens alone: its forward raises.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import refuse_unreached, replace
from dfa_megatron.huggingface.check_model import CLASSES
from dfa_megatron.huggingface.checkpointing import WRAPPED, keep_forward
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    MUST_REACH,
    NAME,
    Arguments,
    Forward,
    LayerContext,
    enter,
    forward_of,
    in_layer,
    innermost,
    leave,
    reach,
)
from dfa_megatron.huggingface.embedded_positions import hook
from dfa_megatron.huggingface.indexers import follow
from dfa_megatron.huggingface.seen import Seen, refuse_for
from dfa_megatron.names import say_once
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.recurrence import dist_conv, dist_mamba1, dist_mamba2, dist_scan, fla_scan
from dfa_megatron.recurrence.upstream import drops_gradient
from dfa_megatron.runtime.cu_seqlens import Offsets

logger = logging.getLogger(__name__)

Real = Callable[..., Any]


def adopt(model: Any, context: LayerContext, attentions: list[torch.nn.Module]) -> None:
    """Give the mixers of a model, its attentions among them, its context, hooks and implementation."""
    decoder = model.get_decoder()
    wanted = {module: listed(module) for module in decoder.modules() if listed(module) or _replaceable(module)}
    wanted |= dict.fromkeys(attentions, frozenset({NAME}))
    for mixer, names in wanted.items():
        vars(mixer)[MUST_REACH] = names
        for name in _replaceable(mixer):
            replace(sys.modules[type(mixer).__module__], name, functools.partial(_replacing, name))
        follow(mixer)
        config = vars(mixer).get("config")
        if config is not None and config._attn_implementation != NAME:  # a copied layer's is not the model's
            config._attn_implementation = NAME
        if _enter not in mixer._forward_pre_hooks.values():
            mixer.register_forward_pre_hook(_enter, prepend=True)
            mixer.register_forward_hook(_check_reached)
            mixer.register_forward_hook(leave, always_call=True)
    hook(decoder)
    for module in {*_parts(decoder), *wanted}:
        setattr(module, CONTEXT, context)
    keep_forward(decoder, saving=context.options.checkpoint == "auto", name=WRAPPED)


def knows_all(model: Any, context: LayerContext) -> bool:
    """Return whether every part of a model is one that `adopt` saw: none was copied, added or replaced since."""
    return all(vars(module).get(CONTEXT) is context for module in _parts(model.get_decoder()))


def _parts(decoder: Any) -> list[torch.nn.Module]:
    """Return what a decoder calls itself, such as rotary embeddings and layers, and the children of these layers."""
    layers = [x for child in decoder.children() if isinstance(child, torch.nn.ModuleList) for x in child]
    return [*decoder.children(), *(part for layer in layers for part in (layer, *layer.children()))]


def _enter(mixer: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Enter the forward that runs, in which a mixer has reached nothing yet."""
    enter(mixer, forward_of(mixer))


def _check_reached(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise where a mixer has run in a distributed forward without reaching each function that its class lists."""
    call = innermost()
    assert call is not None
    if call.forward.distributed and (missed := vars(layer)[MUST_REACH] - call.reached):
        refuse_unreached(layer, missed)


def listed(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that the class of a known layer with a state must call; none for other modules."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return frozenset(name for calls, classes in CLASSES.items() if names & {*classes.split()} for name in calls)


def _replaceable(module: Any) -> set[str]:
    """Return the names of functions to be replaced that the forward of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return {*STANDS_IN, *FUSED} & {*(code.co_names if code is not None else ())}


def _replacing(name: str, real: Real) -> Real:
    signature = inspect.signature(_function_of(real))

    def replaced(*args: Any, **kwargs: Any) -> Any:
        call = innermost()
        if call is None or not call.forward.distributed or name not in _replaceable(call.owner):
            return real(*args, **kwargs)
        forward = call.forward
        if name in FUSED:
            return None
        if isinstance(forward.seen, Seen) and not isinstance(forward.seen.told, Tree):
            refuse_for(f"a layer of type {type(call.owner).__name__} with a state")
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.pop("kwargs", None)
        reach(name)
        called = _by_place(_kernel(name, real, forward), name, signature, len(args))
        with in_layer(call.owner):
            return STANDS_IN[name](called, options_of(forward), given)

    return replaced


def _function_of(real: Any) -> Real:
    """Return a function of transformers, also where the package `kernels` has made a module of it."""
    if isinstance(real, torch.nn.Module):
        (real,) = inspect.getclosurevars(type(real).forward).nonlocals.values()
    found: Real = real
    return found


def _kernel(name: str, real: Real, forward: Forward) -> Real:
    """Return what computes: transformers' own code in place of mamba-ssm's scan that cannot be trained over ranks."""
    trains = torch.is_grad_enabled() and forward.context.size > 1
    if not trains or name != "mamba_selective_scan" or not drops_gradient(real):
        return real
    say_once(logger.warning, "Mamba's scan over ranks is transformers' own: mamba-ssm's drops the state's gradient")
    own: Real = inspect.unwrap(_function_of(real))
    return own


def _by_place(real: Any, name: str, signature: inspect.Signature, count: int) -> Real:
    """Return a function that hands so many arguments over by place: packages behind transformers name them anew."""
    if "forward" in getattr(real, "__dict__", ()):
        what, why = "kernels of the hub in a layer with a state", "they were never compared with one rank"
        raise UnsupportedError(what, why, "a model without use_kernels; installed packages are called all the same")
    names = [*signature.parameters][:count]

    def placed(*args: Any, **kwargs: Any) -> Any:
        return real(*args, *(kwargs.pop(name) for name in names[len(args) :]), **kwargs)

    placed.__name__, placed.__signature__ = name, signature  # type: ignore[attr-defined]
    return placed


def options_of(forward: Forward) -> Arguments:
    """Return the options of a recurrence over the rows of a forward: their documents, or the segments of a tree."""
    tree = forward.seen.told if isinstance(forward.seen, Seen) else None
    if isinstance(tree, Tree):  # masks are refused
        return forward.where | {"cu_seqlens": (0, *(span.hi for span in tree.spans)), "parents": tree.parents}
    return forward.where | {"cu_seqlens": forward.seen}


# What stands in takes the real function, the options of a recurrence, and the call's arguments by name.


def convolution(real: Real, options: Arguments, given: Arguments) -> torch.Tensor:
    """Compute a causal convolution of hidden_states (batch, channels, local_seq) with weight (channels, width)."""

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        out: torch.Tensor = real(**given | {"hidden_states": x})
        return out

    return dist_conv(run, given["hidden_states"], given["weight"].shape[-1], dim=2, **options)


def delta_rule(real: Real, options: Arguments, given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a delta rule whose states are (batch, heads, k_dim, v_dim): gated, or Kimi's with a gate per channel."""
    tokens = {name: given.pop(name) for name in ("query", "key", "value", "g", "beta")}
    return dist_scan(fla_scan(real, keys="key", values="value", packs=False, **given), tokens, **options)


def _state_space(scan: Real, real: Real, options: Arguments, given: Arguments) -> Any:
    """Compute the scan of Mamba-2, or the selective one of Mamba."""
    tokens = {"x": given.pop("hidden_states"), **{name: given.pop(name) for name in ("dt", "B", "C")}}
    out, state = scan(real, tokens, given.pop("A"), **given, **options)
    return (out, state) if given.get("return_final_states") or given.get("return_last_state") else out


STANDS_IN: dict[str, Callable[[Real, Arguments, Arguments], Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": functools.partial(_state_space, dist_mamba2),
    "mamba_selective_scan": functools.partial(_state_space, dist_mamba1),
}
"""What stands in for a function of transformers' modelling files, by its name there."""

FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Functions that compute several of these at once, or return None where they cannot, as they do here."""
