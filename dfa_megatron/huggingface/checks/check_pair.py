"""Read from an encoder-decoder model whether the attention of both stacks can be distributed."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.implementation import kind_of

SIDE = "_dfa_side"
"""The attribute of an attention layer, and of a stack's first layer: "encoder", "decoder", or "cross" between them."""

AT_ENCODER = ("encoder_attn", "crossattention")
"""Names of a decoder layer's attention at an encoder; in a decoder-only model it does not run."""


def is_pair(model: Any) -> bool:
    """Return whether a model is an encoder and a decoder."""
    return bool(getattr(model.config.get_text_config(), "is_encoder_decoder", False))


def two_ways(layer: torch.nn.Module) -> bool:
    """Return whether an attention is in an encoder, or at one, so that it sees later tokens."""
    return getattr(layer, SIDE, "decoder") != "decoder"


def attentions_in(stack: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the attention layers of a stack by name."""
    return {n: x for n, x in stack.named_modules() if hasattr(x, "is_causal") and hasattr(x, "layer_idx")}


def check_pair(model: Any) -> list[torch.nn.Module]:
    """Return the attention layers of an encoder-decoder model, which then have their `SIDE`.

    Raises:
        UnsupportedError: the model computes something that distributed attention would not; it is named.
    """
    found, kind = list[torch.nn.Module](), kind_of(model)
    for side, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        _check_stack(stack, side, kind)
        named = attentions_in(stack)
        sides = ["cross" if name.split(".")[-1] in AT_ENCODER else side for name in named]
        wrong = any(module.is_causal != (own == "decoder") for own, module in zip(sides, named.values(), strict=True))
        each = 1 if side == "encoder" else 2
        if wrong or len(named) != each * len(stack.layers) or (each == 2 and sides.count("cross") != len(stack.layers)):
            raise UnsupportedError(
                f"{kind} with {len(named)} attentions in the {len(stack.layers)} layers of its {side}",
                "it is not known how the others mix tokens",
                "a model like BART, whose encoder's layers have one attention and whose decoder's have two",
            )
        for own, module in zip(sides, named.values(), strict=True):
            setattr(module, SIDE, own)
        setattr(stack.layers[0], SIDE, side)
        found += named.values()
    return found


def _check_stack(stack: Any, side: str, kind: str) -> None:
    """Refuse a stack whose layers need the whole sequence, or differ between ranks."""
    layers = getattr(stack, "layers", None)
    takes = [] if not layers else [*inspect.signature(type(layers[0]).forward).parameters]
    if any(hasattr(module, "relative_attention_bias") for module in stack.modules()):
        why = "attention adds a learned bias of relative positions"
    elif not layers or any("position" in name for name in takes):
        why = f"{side} has no list of layers, or hands positions to them, which would be those of whole sequences"
    else:
        names = (f"{side}_layerdrop", "apply_spec_augment", "num_experts", "sliding_window")
        why = next((f"{name} is {x}, not 0 or off" for name in names if (x := getattr(stack.config, name, None))), "")
    if why:
        raise UnsupportedError(
            f"{kind} whose {why}",
            "kernels take no bias, layers see this rank's tokens alone, and ranks would draw other random numbers",
            "a model of dense layers with positions in its embeddings, like BART, without layerdrop and SpecAugment",
        )
