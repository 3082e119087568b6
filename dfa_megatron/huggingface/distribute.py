"""Distribute the attention of a transformers model over a group of ranks that share each sequence."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import attention_function as attention
from dfa_megatron.huggingface import model_inputs as inputs
from dfa_megatron.huggingface.checkpointing import check_layers, check_options, set_checkpointing
from dfa_megatron.huggingface.checks.check_model import check_model, foreign_code
from dfa_megatron.huggingface.checks.exact_types import EXACT
from dfa_megatron.huggingface.checks.wrappers import check_wrappers
from dfa_megatron.huggingface.current_forward import CONTEXT, NAME, LayerContext, end
from dfa_megatron.huggingface.hook_mixers import adopt
from dfa_megatron.huggingface.implementation import (
    attention_of,
    copy_configs,
    is_distributed,
    is_multimodal,
    kind_of,
    set_attention,
)
from dfa_megatron.huggingface.positions import embedded_positions as embedded
from dfa_megatron.huggingface.router_loss import follow_router
from dfa_megatron.huggingface.tiles.tiled_head import set_tile
from dfa_megatron.plan.language.shape import check_degree
from dfa_megatron.runtime.comm.groups import Group, group_name, group_size
from dfa_megatron.runtime.environment import warn_of_untested

logger = logging.getLogger(__name__)


def distribute_attention(
    model: torch.nn.Module,
    *,
    group: Group = None,
    config: TrainingConfig | None = None,
    reentrant: bool = False,
    accelerate: bool = False,
) -> torch.nn.Module:
    """Give a language model distributed attention; it then takes this rank's part of each sequence.

    A multimodal model (images, sound) takes whole sequences and gives the logits of this rank's tokens: its
    language model alone is distributed. `shard_batch` makes the batches of both.

    Attention is distributed in training and evaluation alike. For generation, and whole sequences on one rank, see
    `local_attention`. The call may be repeated, with another group or other options.

    Args:
        model: a transformers model, or a module that holds one (PEFT).
        group: the ranks that share a sequence, in the order of their tokens; None is the default group.
        config: schedule, kernel, checkpoint and the like.
        reentrant: checkpoint with PyTorch's re-entrant form; see `set_checkpointing`.
        accelerate: batches come from HF Trainer or accelerate. In evaluation, every rank then has whole sequences of
            its own and attention is local; in training, whoever called the model weighs the loss of this rank's tokens.

    Returns:
        The same model.

    Raises:
        UnsupportedError: the model needs something unsupported; the message names it.
    """
    warn_of_untested()
    options = TrainingConfig.of(config)
    check_options(options, reentrant=reentrant)
    inner = transformers_model(model)
    check_wrappers(model, inner)
    check_model(inner)
    check_layers(inner, options, reentrant=reentrant)
    if accelerate:
        _check_loaded(inner)
    _note_untested(inner)
    attention.register()
    name = group_name(group)
    if options.fixed_degree > 1:  # "auto" takes one that divides
        check_degree(options.fixed_degree, group_size(name), inner.config.get_text_config().num_attention_heads)
    known: LayerContext | None = getattr(inner, CONTEXT, None)
    before = copy_configs(model, inner) if known is None else known.before
    set_attention(inner, NAME)
    if not is_distributed(inner):  # transformers only warns
        raise UnsupportedError(
            kind_of(inner),
            "its layers compute attention in code of their own, whatever implementation is set",
            "a model whose layers take attention implementations",
        )
    context = LayerContext(
        group=name,
        size=group_size(name),
        options=options,
        before=before,
        accelerate=accelerate,
        multimodal=is_multimodal(inner),
        varied=known is not None and known.varied,
        compared=known is not None and known.compared,
    )
    decoder = inner.get_decoder()
    if known is None:
        _hook(inner, decoder)
    for module in {inner, decoder, *embedded.rotaries_of(decoder)}:
        setattr(module, CONTEXT, context)
    adopt(inner, context, NAME)
    set_tile(inner, options)
    set_checkpointing(inner, options.checkpoint, reentrant=reentrant, offload=options.remat_offload)
    return model


def _check_loaded(model: Any) -> None:
    """Refuse a model to which accelerate's loaders do not give what it needs."""
    if is_multimodal(model):
        raise UnsupportedError(
            f"{kind_of(model)} under accelerate",
            "whole sequences are embedded, and accelerate's loader cuts tokens",
            "dfa_megatron.deepspeed.initialize or distribute_attention in a loop of your own, with shard_batch",
        )


def _hook(inner: Any, decoder: Any) -> None:
    """Register the hooks of a model and its decoder, which need a `LayerContext` when they run."""
    decoder.register_forward_pre_hook(inputs.prepare, with_kwargs=True)
    decoder.register_forward_hook(end, always_call=True)
    embedded.hook(decoder)
    follow_router(type(inner).forward)
    if inner is not decoder:
        inner.register_forward_pre_hook(inputs.begin, with_kwargs=True)
        inner.register_forward_hook(end, always_call=True)


@contextmanager
def local_attention(model: torch.nn.Module) -> Iterator[None]:
    """Give the model its former attention for a while: whole sequences on one rank, caches, generation."""
    inner = transformers_model(model)
    context: LayerContext | None = getattr(inner, CONTEXT, None)
    if context is None:
        yield
        return
    before, present, context.local = context.local, attention_of(inner), True
    set_attention(inner, context.before)
    try:
        yield
    finally:
        set_attention(inner, present)
        context.local = before


def transformers_model(model: torch.nn.Module) -> Any:
    """Return the transformers model that `model` is or holds.

    Raises:
        UnsupportedError: there is none, or more than one.
    """
    found = list(dict.fromkeys(_outermost(model)))
    kind, kinds = type(model).__name__, ", ".join(type(each).__name__ for each in found)
    if not found:
        raise UnsupportedError(
            f"a model of type {kind}",
            "no transformers model was found in it",
            "a transformers causal language model; elsewhere, dfa_megatron.DistFlashAttention",
        )
    if len(found) > 1:
        raise UnsupportedError(
            f"several transformers models in one module, a {kind} with {kinds}",
            "only one would have distributed attention, and the others would mistake a part of a sequence for a whole",
            "an engine for each, or all but one of them outside the module that is given",
        )
    return found[0]


def _outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost transformers models in a module."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children() if isinstance(module, torch.nn.Module) else ():
        yield from _outermost(child)


def _note_untested(model: Any) -> None:
    """Warn once of a type, and of code, that no test compared with one rank."""
    if model.config.model_type not in EXACT:
        _warn(
            f"models of type {model.config.model_type!r} pass the checks of distribute_attention, but their gradients "
            "have not been compared with eager attention; dfa_megatron.huggingface.prove(model) compares them"
        )
    for name in foreign_code(model):
        _warn(
            f"{name} is not of transformers itself, so it was never compared with one rank: what it computes from "
            "several tokens at once would see those of one rank alone. dfa_megatron.huggingface.prove(model) compares "
            "them with one rank"
        )


_warn = functools.cache(logger.warning)
