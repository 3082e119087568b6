"""Distribute the attention of a transformers model over a group of ranks that share each sequence."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.huggingface import attention_function as attention
from dfa_megatron.huggingface import model_inputs as inputs
from dfa_megatron.huggingface.check_model import check_adapters, check_model, check_parts, is_multimodal, kind_of
from dfa_megatron.huggingface.checkpointing import check_layers, check_options, set_checkpointing
from dfa_megatron.huggingface.current_forward import CONTEXT, NAME, LayerContext, leave
from dfa_megatron.huggingface.hook_mixers import adopt
from dfa_megatron.huggingface.indexers import refusal
from dfa_megatron.huggingface.join_outputs import classifies, join_scores
from dfa_megatron.huggingface.loss import follow_router
from dfa_megatron.huggingface.tiled_head import set_tile
from dfa_megatron.plan.degree import check_degree
from dfa_megatron.runtime.comm.groups import Group, group_name, group_size
from dfa_megatron.runtime.environment import warn_of_untested


def distribute_attention(
    model: torch.nn.Module,
    *,
    group: Group = None,
    config: TrainingConfig | None = None,
    reentrant: bool = False,
    unlisted: bool = False,
) -> torch.nn.Module:
    """Give a language model distributed attention. It still takes whole batches, the same on every rank of the group.

    The model cuts a batch at its door. Its loss is the whole batch's; gradients, averaged over the ranks, are those of
    one process. Logits and hidden states are of this rank's tokens, which `dfa_megatron.local_positions` names. A
    multimodal model (images, sound) embeds whole sequences: its language model alone is distributed.

    A batch has "input_ids" (batch, seq), or "inputs_embeds" up to 1 GiB, and if wanted:

    - "labels" (batch, seq), not shifted, -100 where there is no loss. As in transformers, the last token of a document
      is trained on the next one's first, unless that label is -100. "num_items_in_batch", to accumulate
      gradients, is the labels of the whole step divided by the number of groups.
    - "attention_mask" with padding on the right, whose labels are -100.
    - "position_ids" (batch or 1, seq) that restart at 0 where a document of a packed row begins, or "cu_seq_lens_q" and
      "cu_seq_lens_k" of transformers' padding-free collators. A model that embeds axes takes (4, batch, seq), places
      first.
    - in place of both "prompt_tree": (lengths, parents) of segments that share prefixes, or "mask": any value of
      `dfa_megatron.masks`, with any "position_ids" (1, seq). All rows have them.
    - what processors of images, video and sound make, for a multimodal model.

    Args:
        model: a transformers model, or a module that holds one (PEFT).
        group: the ranks that share a sequence, in the order of their tokens; None is the default group.
        config: schedule, kernel, checkpoint and the like.
        reentrant: checkpoint with PyTorch's re-entrant form; see `set_checkpointing`.
        unlisted: take a type, a class or layers that no test compared with one process; then run `prove`.

    Attention is distributed in training and evaluation alike. For generation, and other sequences on each rank, see
    `local_attention`. The call may be repeated, with another group or other options.

    Returns:
        The same model.

    Raises:
        UnsupportedError: the model needs something unsupported; the message names it.
    """
    warn_of_untested()
    options = TrainingConfig.of(config)
    check_options(options, reentrant=reentrant)
    inner = transformers_model(model)
    for module in model.modules():  # of wrappers within wrappers too
        check_adapters(module)
    attentions = check_model(inner, unlisted=unlisted)
    check_layers(inner, options, reentrant=reentrant)
    attention.register()
    name = group_name(group)
    check_parts(model, name)
    if options.fixed_degree > 1:  # "auto" takes one that divides
        check_degree(options.fixed_degree, group_size(name), inner.config.get_text_config().num_attention_heads)
    known: LayerContext | None = getattr(inner, CONTEXT, None)
    decoder, scores = inner.get_decoder(), classifies(inner)
    if known is None and hasattr(decoder, CONTEXT):
        what = f"a {type(inner).__name__} around a decoder that is distributed already"
        raise UnsupportedError(what, "its batches would be cut twice", "distribute_attention of one of the two alone")
    context = known or LayerContext(_copy_configs(model, inner), multimodal=is_multimodal(inner))
    if context.group != name:  # the ranks of another one have compared their weights
        context = replace(context, compared=())
    _set_attention(inner)
    context = replace(context, group=name, size=group_size(name), options=options, unlisted=unlisted, local=False)
    if known is None:
        _hook(decoder if scores else inner, decoder)
        if scores:
            join_scores(inner)
    for module in (inner, decoder):
        setattr(module, CONTEXT, context)
        follow_router(module.forward)
    adopt(inner, context, attentions)
    set_tile(inner, options)
    set_checkpointing(inner, options.checkpoint, reentrant=reentrant, offload=options.remat_offload)
    return model


def _set_attention(model: Any) -> None:
    """Give a model's text the attention implementation `dfa`, which also serves what is local; towers keep theirs."""
    config, text = model.config, model.config.get_text_config()
    field = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    if text._attn_implementation != NAME:
        model.set_attn_implementation(NAME if text is config else {field: NAME})
    if text._attn_implementation != NAME:  # transformers only warns
        raise UnsupportedError(
            kind_of(model),
            "its layers compute attention in code of their own, whatever implementation is set",
            "a model whose layers take attention implementations",
        )


def _copy_configs(model: Any, inner: Any) -> str:
    """Give the modules of a model, and those around it, copies of their configurations; return its attention.

    The configuration holds the implementation, and models may share it. A model made from the configuration of one that
    is distributed has transformers' default.
    """
    from transformers import PretrainedConfig

    before: str = inner.config.get_text_config()._attn_implementation
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))
    return before if before != NAME else "sdpa" if inner._supports_sdpa else "eager"


def _hook(inner: Any, decoder: Any) -> None:
    """Register the hooks of a model and its decoder, which need a `LayerContext` when they run."""
    decoder.register_forward_pre_hook(inputs.prepare, with_kwargs=True)
    if inner is not decoder:
        inner.register_forward_pre_hook(inputs.begin, with_kwargs=True)
    inner.register_forward_hook(inputs.finish)
    for module in {inner, decoder}:
        module.register_forward_hook(leave, always_call=True)
    decoder.register_load_state_dict_post_hook(inputs.compare_again)


@contextmanager
def local_attention(model: torch.nn.Module) -> Iterator[None]:
    """Give the model its former attention for a while: whole sequences on one rank, caches, generation."""
    context: LayerContext | None = getattr(transformers_model(model), CONTEXT, None)
    with nullcontext() if context is None else for_a_while(context, local=True):
        yield


def train_indexers(model: torch.nn.Module, weight: float = 1.0) -> None:
    """Train the indexers of a distributed model, which transformers does not: each learns what its layer attends to.

    The model's loss gets `weight` times the sum of the layers' losses (`dfa_megatron.indexed.index_loss`). A loss of
    your own from logits adds `indexer_loss(model)` itself. An indexer learns from its own loss alone, and nothing else
    learns from it. Where gradients are off there is none.

    Args:
        model: as `distribute_attention` returned it, or as a trainer holds it.
        weight: of every layer's loss; 0 ends the training.

    Raises:
        UnsupportedError: the model is not distributed, or has no indexers whose weights train.
    """
    inner = transformers_model(model)
    context: LayerContext | None = getattr(inner, CONTEXT, None)
    why = "it is not distributed" if context is None else "" if weight == 0 else refusal(inner)
    if context is None or why or not 0 <= weight < math.inf:
        raise UnsupportedError(
            f"train_indexers(weight={weight}) of {kind_of(inner)}",
            why or "it is the weight of a loss",
            "a weight from 0 on, for a model with indexers that distribute_attention took",
        )
    context.indexers = float(weight)


def indexer_loss(model: torch.nn.Module) -> torch.Tensor:
    """Return the sum of the losses of a model's indexers in its last call, of the whole batch, without the weight.

    Raises:
        UnsupportedError: that call had none.
    """
    context: LayerContext | None = getattr(transformers_model(model), CONTEXT, None)
    if context is None or context.indexer_loss is None:
        what, why = "indexer_loss of a model", "its last call did not train indexers"
        raise UnsupportedError(what, why, "train_indexers(model), and a call with gradients")
    return context.indexer_loss


def transformers_model(model: torch.nn.Module) -> Any:
    """Return the transformers model that `model` is or holds."""
    found = list(dict.fromkeys(_outermost(model)))
    kind, kinds = type(model).__name__, ", ".join(type(each).__name__ for each in found)
    if not found:
        instead = "a transformers causal language model; elsewhere, dfa_megatron.DistFlashAttention"
        raise UnsupportedError(f"a model of type {kind}", "no transformers model was found in it", instead)
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
