"""Checkpoint the layers of a transformers model; attention runs once with 'auto' and 'remat', twice with 'full'."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron import remat
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.check_model import kind_of
from dfa_megatron.huggingface.current_forward import Running, enter, innermost, leave

logger = logging.getLogger(__name__)

_FUNCTION = "_gradient_checkpointing_func"
"""The attribute in which transformers keeps the checkpoint function of a layer."""

WRAPPED = "checkpoint_fn"
"""The attribute in which a module that PyTorch's `checkpoint_wrapper` makes, as FSDP's options do, keeps its own."""

_SET = "_dfa_checkpointing"  # the attribute of a model whose checkpoints `set_checkpointing` set


def set_checkpointing(
    model: Any,
    checkpoint: str,
    *,
    reentrant: bool = False,
    offload: bool = False,
    function: Callable[..., Any] | None = None,
) -> None:
    """Checkpoint the layers of a transformers model.

    Args:
        checkpoint: a value of `TrainingConfig.checkpoint`; "auto" and "none" undo what an earlier call set.
        reentrant: with PyTorch's re-entrant form, which saves only a layer's input. This input must have a gradient,
            so frozen embeddings (PEFT) are made to give it one.
        offload: save each layer's input, and with 'remat' attention's output and lse, in pinned host memory.
        function: a re-entrant checkpoint function in place of PyTorch's, called as function(layer, *inputs).
    """
    if checkpoint in ("auto", "none"):
        if vars(model).pop(_SET, False):
            (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
        return
    setattr(model, _SET, True)
    reentrant = reentrant or function is not None
    # The first name is the newer one; the second warns that it is deprecated where both exist.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for module in model.modules():
        own = getattr(module, _FUNCTION, None)
        if own is not None:
            setattr(module, _FUNCTION, checkpoint_function(function or own, checkpoint, offload=offload))
    if reentrant and not any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):
        model.enable_input_require_grads()


def checkpoint_function(own: Callable[..., Any], checkpoint: str, *, offload: bool) -> Callable[..., Any]:
    """Return one that saves what a value of `TrainingConfig.checkpoint` says, with `offload` in host memory."""
    chosen = _saving(own, offload=offload) if checkpoint == "remat" else own
    takes_inputs = getattr(chosen, "func", None) is remat.remat_checkpoint
    return remat.keeping_inputs_on_host(chosen) if offload and not takes_inputs else chosen


def check_layers(model: Any, options: TrainingConfig, *, reentrant: bool) -> None:
    """Refuse layers that transformers cannot checkpoint, before the model is changed."""
    able = model.supports_gradient_checkpointing and any(hasattr(x, "gradient_checkpointing") for x in model.modules())
    kind, why = kind_of(model), "transformers does not checkpoint its layers"
    if not able and options.checkpoints_layers:
        raise UnsupportedError(f"checkpoint={options.checkpoint!r} for {kind}", why, "checkpoint='none'")
    if reentrant and any(getattr(x, "is_kv_shared_layer", False) for x in model.modules()):
        raise UnsupportedError(
            f"re-entrant checkpointing of {kind} whose layers share keys",
            "the gradients of keys and values would stay in the layers that reuse them",
            "checkpointing that is not re-entrant",
        )


def check_options(options: TrainingConfig, *, reentrant: bool) -> None:
    """Refuse options of checkpoints that nothing makes."""
    if options.checkpoints_layers:
        return
    what = f"with checkpoint={options.checkpoint!r}"
    if reentrant:
        raise UnsupportedError(f"reentrant {what}", "it does not say that layers are checkpointed", "'remat' or 'full'")
    if options.remat_offload:
        why = "it does not say that something is saved for a recompute"
        raise UnsupportedError(f"remat_offload {what}", why, "checkpoint 'remat' or 'full'")


def keep_forward(model: torch.nn.Module, *, saving: bool, name: str = _FUNCTION) -> None:
    """Let the checkpoint functions of a model's layers, whoever set them, run a layer again in its own forward.

    saving: they save attention's output and lse too.
    name: the attribute in which they are.
    """
    for module in model.modules():
        own = vars(module).get(name)
        if own is not None and getattr(own, "func", None) is not _checkpoint:
            if not saving and _SET not in vars(model):
                _say_twice()
            setattr(module, name, functools.partial(_checkpoint, _saving(own) if saving else own))
        elif name == _FUNCTION and getattr_static(module, "gradient_checkpointing", None) is not None:  # of no wrapper
            return  # the first such module tells of all: transformers sets their functions together


@functools.cache
def _say_twice() -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("dfa: layers are checkpointed and checkpoint='none' runs their attention twice; 'auto' saves it")


def _saving(own: Callable[..., Any], *, offload: bool = False) -> Callable[..., Any]:
    """Return a checkpoint function that saves attention's output and lse."""
    keywords = getattr(own, "keywords", {})
    if "context_fn" in keywords:
        return own
    if keywords.get("use_reentrant") is False:
        return functools.partial(own, context_fn=functools.partial(remat.context_fn, offload=offload))
    return functools.partial(remat.remat_checkpoint, checkpoint=own, offload=offload)


def _checkpoint(own: Callable[..., Any], layer: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Run a checkpoint function, whose recompute enters the forward."""
    call = innermost()
    return own(layer if call is None else functools.partial(_run, call, layer), *inputs, **more)


def _run(call: Running, layer: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    enter(call.owner, call.forward)
    try:
        return layer(*inputs, **more)
    finally:
        leave(call.owner)
