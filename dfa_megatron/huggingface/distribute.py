"""Distribute the attention of a transformers model over a group of ranks that share each sequence."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import attention_function as attention
from dfa_megatron.huggingface import model_inputs as inputs
from dfa_megatron.huggingface.attention_function import NAME
from dfa_megatron.huggingface.check_model import check_model, foreign_code, kind_of
from dfa_megatron.huggingface.checkpointing import check_layers, check_options, set_checkpointing
from dfa_megatron.huggingface.exact_types import EXACT
from dfa_megatron.huggingface.layer_context import CONTEXT, Current, LayerContext
from dfa_megatron.huggingface.parts.text_part import (
    attention_of,
    has_parts,
    is_distributed,
    own_configs,
    set_attention,
    switch_attention,
)
from dfa_megatron.huggingface.parts.whole_inputs import take_whole
from dfa_megatron.huggingface.parts.wrappers import check_wrappers
from dfa_megatron.huggingface.positions import own_positions
from dfa_megatron.huggingface.positions.embedded_positions import padding_of
from dfa_megatron.huggingface.positions.tree_inputs import take_added
from dfa_megatron.huggingface.recurrent import layers as recurrent
from dfa_megatron.huggingface.tiles.tiled_head import set_tile
from dfa_megatron.huggingface.tiles.tiled_layers import tile_layers
from dfa_megatron.huggingface.trainers.shared_batches import check_parallelism
from dfa_megatron.plan.language.heads import check_degree
from dfa_megatron.runtime.comm.groups import Group, group_name, group_size

logger = logging.getLogger(__name__)


def distribute_attention(
    model: torch.nn.Module,
    *,
    group: Group = None,
    config: DistAttentionConfig | None = None,
    reentrant: bool = False,
    accelerate: bool = False,
) -> torch.nn.Module:
    """Give a causal language model distributed attention; it then takes this rank's part of each sequence.

    A model of several parts (images, sound) takes whole sequences and gives the logits of this rank's tokens: its
    language model alone is distributed. `shard_batch` makes the batches of both.

    Attention is distributed in training and evaluation alike. For whole sequences on one rank, generation among them,
    see `local_attention`. The call may be repeated, with another group or other options.

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
    options = config or DistAttentionConfig()
    options.refuse_outside("huggingface", "leaving it out: batches are cut into one slice a rank")
    check_options(options, reentrant=reentrant)
    inner = transformers_model(model)
    check_wrappers(model, inner)
    layers = check_model(inner)
    check_layers(inner, options, reentrant=reentrant)
    if accelerate:
        _check_loaded(inner)
    _note_untested(inner)
    attention.register()
    name = group_name(group)
    if options.fixed_degree > 1:  # "auto" takes one that divides
        check_degree(options.fixed_degree, group_size(name), inner.config.get_text_config().num_attention_heads)
    known: LayerContext | None = getattr(inner, CONTEXT, None)
    before = own_configs(model, inner) if known is None else known.before
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
        options=options.within("function"),
        before=before,
        accelerate=accelerate,
        parts=has_parts(inner),
        current=Current() if known is None else known.current,
    )
    decoder = inner.get_decoder()
    if known is None:
        _hook(inner, decoder, layers)
    others = (*own_positions.modules_of(decoder), *recurrent.modules_of(decoder))
    for module in {inner, decoder, *layers, *others}:
        setattr(module, CONTEXT, context)
    set_tile(inner, options)
    tile_layers(inner, options, kind_of(inner))
    set_checkpointing(inner, options.checkpoint, reentrant=reentrant, offload=options.remat_offload)
    return model


def _check_loaded(model: Any) -> None:
    """Refuse a model to which accelerate's loaders do not give what it needs."""
    kind = kind_of(model)
    if has_parts(model):
        raise UnsupportedError(
            f"{kind} with several parts under accelerate",
            "its loader cuts tokens, but images are embedded in whole sequences",
            "dfa_megatron.deepspeed.initialize or distribute_attention in a loop of your own, with shard_batch",
        )
    if padding_of(model.get_decoder()) is not None:
        raise UnsupportedError(
            f"{kind} under accelerate",
            "its positions begin behind that of padding, but evaluation is local there and would use those of the "
            "batches, which begin at 0",
            "dfa_megatron.deepspeed.initialize or distribute_attention in a loop of your own, with shard_batch",
        )


def _hook(inner: Any, decoder: Any, layers: list[torch.nn.Module]) -> None:
    """Register the hooks of a model, its decoder and its layers, which need a `LayerContext` when they run."""
    inner.register_forward_pre_hook(check_parallelism, with_kwargs=True)
    inner.register_forward_pre_hook(inputs.follow_mode, with_kwargs=True)
    if inner is not decoder:
        inner.register_forward_pre_hook(inputs.check_loss, with_kwargs=True)
        inner.register_forward_pre_hook(take_added, with_kwargs=True)
        inner.register_forward_hook(inputs.end_forward, always_call=True)
    if has_parts(inner):
        inner.register_forward_pre_hook(take_whole, with_kwargs=True)
    decoder.register_forward_pre_hook(inputs.prepare, with_kwargs=True)
    own_positions.hook(decoder)
    recurrent.hook(decoder)
    for layer in layers:
        layer.register_forward_pre_hook(inputs.check_told, with_kwargs=True)


@contextmanager
def local_attention(model: torch.nn.Module) -> Iterator[None]:
    """Give the model its former attention for a while: whole sequences on one rank, caches, generation."""
    inner = transformers_model(model)
    context: LayerContext | None = getattr(inner, CONTEXT, None)
    if context is None:
        yield
        return
    current = context.current
    before, present, current.held = current.held, attention_of(inner), True
    switch_attention(inner, context.before)
    try:
        yield
    finally:
        switch_attention(inner, present)
        current.held = before


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
    for child in module.children():
        yield from _outermost(child)


def _note_untested(model: Any) -> None:
    _note_type(model.config.model_type)
    for name in foreign_code(model):
        _note_foreign(name)


@functools.cache
def _note_type(model_type: str) -> None:
    if model_type not in EXACT:
        logger.warning(
            "models of type %r pass the checks of distribute_attention, but their gradients have not been compared "
            "with eager attention; `dfa-megatron prove huggingface CONFIG` compares them",
            model_type,
        )


@functools.cache
def _note_foreign(name: str) -> None:
    logger.warning(
        "%s is not of transformers itself, so it was never compared with one rank: what it computes from several "
        "tokens at once would see those of one rank alone. dfa_megatron.huggingface.prove(model) compares them "
        "with one rank",
        name,
    )
