"""Refuse a call that asks for something that would be wrong on parts of sequences."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import seen
from dfa_megatron.huggingface.current_forward import LayerContext
from dfa_megatron.huggingface.loss import adds_up
from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.huggingface.tiled_head import causal_loss
from dfa_megatron.huggingface.windows import WindowMask

LEFT_OUT = "_dfa_left_out"
"""The attribute of accelerate's ParallelismConfig by which `distribute_accelerator` says that it leaves cp out."""

LABELS = ("shift_labels", "labels")
CACHES = ("past_key_values", "cache")  # before and since transformers 5.24

_MEDIA = ("pixel_values", "pixel_values_videos", "input_features")
"""Endings of the names of arguments for images and sound."""


def arguments_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, positional ones too, by their names in the forward of the module's class."""
    names = [parameter.name for parameter in parameters_of(module.__class__)[1:]]  # without self
    return dict(zip(names, args, strict=False)) | kwargs


@functools.cache
def parameters_of(model: Any) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a class's forward."""
    return tuple(inspect.signature(model.forward).parameters.values())


def check_by_name(args: tuple[Any, ...]) -> None:
    """Refuse positional arguments, in which nothing is looked for.

    Raises:
        UnsupportedError: there are some.
    """
    if args:
        raise UnsupportedError(
            "positional arguments after input_ids", "positions and caches are looked for by name", "keyword arguments"
        )


def takes(model: Any, name: str) -> bool:
    """Return whether the forward of a module's class takes an argument of that name."""
    kinds = {parameter.name: parameter.kind for parameter in parameters_of(model.__class__)}
    return name in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def check_local(given: dict[str, Any]) -> None:
    """Refuse a tree or a mask for local attention.

    Raises:
        UnsupportedError: a call has one.
    """
    if first_of(given, (seen.TREE, seen.MASK)) is not None:
        seen.refuse_for("a model with its own attention")


def check_parallelism() -> None:
    """Refuse accelerate's own context parallelism, where `distribute_accelerator` did not leave it out.

    Raises:
        UnsupportedError: a process has it.
    """
    state = sys.modules.get("accelerate.state")
    config = None if state is None else state.AcceleratorState._shared_state.get("parallelism_config")
    size = getattr(config, "cp_size", 1)
    if size > 1 and not hasattr(config, LEFT_OUT):
        raise UnsupportedError(
            f"distribute_attention beside ParallelismConfig(cp_size={size}) of accelerate",
            "accelerate would drop the masks of layers, and cut batches a second time",
            "distribute_accelerator(accelerator, model), or distribute_trainer(trainer)",
        )


def check_loss(model: Any, given: dict[str, Any], context: LayerContext) -> None:
    """Refuse the ways in which a model's own loss would be wrong on a part of a sequence.

    Raises:
        UnsupportedError: a loss that is no sum over this rank's tokens, or labels and a number that do not fit.
    """
    if first_of(given, LABELS) is None or context.size == 1:
        return
    if not computes_loss(model):
        raise UnsupportedError(
            f"labels for a model of type {type(model).__name__}",
            "its loss is a mean over the tokens of this rank, not of all",
            "no labels in the call, and causal_lm_loss on its logits",
        )
    _check_function(model, given.get("ignore_index"))
    count = given.get("num_items_in_batch")
    if isinstance(count, torch.Tensor) and count.dtype in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"num_items_in_batch of {count.dtype}",
            "mixed precision rounded it, which would scale the loss",
            "a Python number or an integer tensor: the labels of the whole batch",
        )
    wrong = first_of(given, LABELS).shape != first_of(given, ("input_ids", "inputs_embeds")).shape[:2]
    if wrong:
        raise UnsupportedError(
            f"labels of shape {tuple(first_of(given, LABELS).shape)}",
            "each token of the batch has one, and the model cuts them alike",
            "labels (batch, seq) of whole sequences, not shifted, or shift_labels",
        )


def _check_function(model: Any, ignored: int | None) -> None:
    """Refuse a loss function that is not known to sum over this rank's tokens, and labels that it would ignore."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    own = model.loss_function
    own = LOSS_MAPPING.get(model.loss_type, own) if own is causal_loss else own  # which stands for what the type names
    if not adds_up(own):
        raise UnsupportedError(
            f"labels for the loss function {getattr(own, '__qualname__', own)}",
            "it is given the labels of this rank's tokens, already shifted, and might shift them or take their mean",
            "transformers' ForCausalLMLoss; a function that dfa_megatron.huggingface.sums_tokens marks; or no labels, "
            "and causal_lm_loss on the logits",
        )
    if ignored not in (None, IGNORED):
        raise UnsupportedError(f"ignore_index={ignored} in a call", f"the ranks count labels but for {IGNORED}", "-100")


def computes_loss(model: Any) -> bool:
    """Return whether a model computes its loss by transformers' loss function, which takes the number of labels."""
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


def check_generation(given: dict[str, Any], context: LayerContext) -> None:
    """Refuse what `model.generate` asks for in its calls: a key cache, and the logits of the last tokens.

    Raises:
        UnsupportedError: a call asks for one of them.
    """
    kept = given.get("logits_to_keep")
    asked = {
        "a key cache": given.get("use_cache") or first_of(given, CACHES) is not None,
        "logits_to_keep": context.size > 1 and (isinstance(kept, torch.Tensor) or kept),
    }
    if found := " and ".join(name for name, value in asked.items() if value):
        raise UnsupportedError(
            f"{found}, as model.generate asks for",
            "each rank holds, and would keep, a part of the sequence",
            "model.generate within dfa_megatron.huggingface.local_attention(model), on whole sequences of this rank; "
            "use_cache=False and logits_to_keep=0 in other calls",
        )


def check_decoder(args: tuple[Any, ...], kwargs: dict[str, Any], context: LayerContext) -> None:
    """Refuse arguments of a decoder that need a whole sequence, and arguments that these checks cannot find.

    Raises:
        UnsupportedError: a cache, images or sound, attention weights, or masks of another model.
    """
    check_by_name(args[1:])
    check_generation(kwargs, context)
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions", "attention weights are never in memory", "output_attentions=False")
    masks = kwargs.get("attention_mask")
    plain = isinstance(masks, dict) and all(mask is None or isinstance(mask, WindowMask) for mask in masks.values())
    if isinstance(masks, dict) and not (context.multimodal and plain):
        raise UnsupportedError(
            "masks made by the model around this one",
            "they may let tokens see others in ways of their own",
            "distribute_attention of the whole model, if its masks are causal but for the images of Gemma 3 and 4",
        )
    if (media := media_in(kwargs)) and context.size > 1:
        raise UnsupportedError(
            f"{media} on {context.size} ranks",
            "images and sound belong to the whole sequence, and this rank holds a part of its tokens",
            "distribute_attention of the whole model, which embeds whole sequences and then cuts them",
        )


def media_in(given: dict[str, Any]) -> str:
    """Return the names of the images and the sound of a call."""
    return ", ".join(name for name in given if name.endswith(_MEDIA) and given[name] is not None)


def first_of(given: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of some arguments that a call brings, None if it brings none of them."""
    return next((given[name] for name in names if given.get(name) is not None), None)
