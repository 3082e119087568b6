"""Make the `Forward` of a call from its whole batch, cut the batch, and give the decoder its inputs.

    model(**whole batch)     begin: read the batch, compare it with the other ranks', cut it; enter the forward
      decoder(**part)        prepare: positions, no mask, the forward in a keyword
        layers               attention and the others find the forward
      loss                   finish: the mean of the ranks' losses, on every rank

A decoder may be called alone. While attention is the model's own, the hooks only say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import call_checks as checks
from dfa_megatron.huggingface import embed_first
from dfa_megatron.huggingface.adapters import check_adapters
from dfa_megatron.huggingface.attention_function import nothing_hidden
from dfa_megatron.huggingface.batch import OF_HOOKS, OF_TOKENS, cut_labels, forward_of_batch, part_of, tokens_of
from dfa_megatron.huggingface.check_model import check_model
from dfa_megatron.huggingface.checkpointing import keep_forward
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    KEYWORD,
    NAME,
    Arguments,
    Forward,
    Handed,
    LayerContext,
    enter,
    forward_of,
    forward_of_context,
)
from dfa_megatron.huggingface.document_starts import FLASH_KEYS
from dfa_megatron.huggingface.embedded_positions import refuse_positions
from dfa_megatron.huggingface.hook_mixers import adopt, knows_all
from dfa_megatron.huggingface.implementation import attention_of, is_distributed
from dfa_megatron.huggingface.loss import as_whole
from dfa_megatron.huggingface.padding import CAUSAL
from dfa_megatron.huggingface.router_loss import check_router
from dfa_megatron.huggingface.same_batch import check_same
from dfa_megatron.huggingface.seen import MASK, TREE
from dfa_megatron.huggingface.tiled_head import tile_of
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.runtime.comm.weights import check_weights

_ALPHA = "neftune_noise_alpha"
"""The attribute of embeddings by which transformers' hook scales NEFTune's noise, over the root of length and width."""

ArgsAndKeywords = tuple[tuple[Any, ...], Arguments]


def begin(model: Any, args: tuple[Any, ...], kwargs: Arguments, *, alone: bool = False) -> ArgsAndKeywords:
    """Make the forward of a model's call, or of a decoder's that is called alone, enter it, and cut the batch.

    Raises:
        UnsupportedError: the call asks for what is wrong on parts of sequences, or the ranks give other batches.
        DisagreementError: the ranks hold other weights, or another rank refuses its batch.
    """
    context: LayerContext = getattr(model, CONTEXT)
    check_adapters(model)  # which may be added later than attention is distributed
    if not knows_all(model, context):  # layers were copied or replaced
        adopt(model, context, check_model(model, unlisted=context.unlisted))
    if torch.is_grad_enabled():
        keep_forward(model, saving=context.options.checkpoint == "auto")
    given = checks.arguments_of(model, args, kwargs)
    tile = tile_of(model, given)
    if not is_distributed(model):
        checks.check_local(given)
        enter(model, Forward(context, distributed=False, tile=tile))
        return args, {name: x for name, x in kwargs.items() if name not in (TREE, MASK)}
    checks.check_parallelism()
    check_router(model)
    verified = bool(context.group) and context.options.verify != "off"
    if verified and not context.compared:
        check_weights(model, context.group)
        context.compared = True
    try:
        kept, forward = _cut(model, given, alone=alone)
    except Exception:
        if verified:  # the others wait for this rank's number
            check_same(context.group, None, None)
        raise
    if verified:
        batch = {name: x for name, x in given.items() if name in OF_TOKENS and x is not None}
        check_same(context.group, batch, tokens_of(given))
    enter(model, replace(forward, tile=tile))
    return (), kept


def _cut(model: Any, given: Arguments, *, alone: bool) -> tuple[Arguments, Forward]:
    """Return the arguments for a model, or for a decoder that is called alone, and the forward of a whole batch."""
    context: LayerContext = getattr(model, CONTEXT)
    given = {name: x for name, x in given.items() if x is not None}
    tokens_of(given)
    checks.check_generation(given, context)
    checks.check_loss(model, given, context)
    decoder = model if alone else model.get_decoder()
    if context.multimodal and not alone:
        given = embed_first.take_whole(decoder, given)
    forward = forward_of_batch(decoder, given, context)
    if not context.multimodal:
        return part_of(model, cut_labels(given, context), forward), forward
    kept = {name: x for name, x in cut_labels(given, context).items() if name not in OF_HOOKS}
    if alone:
        return kept, forward
    kept, images = embed_first.for_model(model, kept, forward.seen)
    return kept, replace(forward, images=images)


def finish(model: Any, args: Any, output: Any) -> Any:
    """Give every rank the loss of the whole batch; its gradient stays that of this rank's tokens, times the ranks.

    In evaluation it is NaN without a label that counts, as in one process.
    """
    forward = forward_of(model)
    if forward.labelled is None:
        return None
    named = isinstance(output, Mapping)
    loss: torch.Tensor | None = output.get("loss") if named else output[0]
    if loss is None:
        return None
    whole = as_whole(loss, forward.context.group) if forward.context.size > 1 else loss
    if not model.training:
        whole = torch.where(forward.labelled.to(whole.device), whole, torch.nan)
    if not named:
        return (whole, *output[1:])
    output["loss"] = whole
    return output


def prepare(decoder: Any, args: tuple[Any, ...], kwargs: Arguments) -> ArgsAndKeywords:
    """Give a decoder the positions of this rank's tokens, and its layers the forward.

    Raises:
        UnsupportedError: as `begin` does, or the model changed what it was given.
    """
    context: LayerContext = getattr(decoder, CONTEXT)
    if forward_of_context(context) is None:
        args, kwargs = begin(decoder, args, kwargs, alone=True)
    forward = forward_of_context(context)
    assert forward is not None
    passes_on = attention_of(decoder) == NAME and checks.takes(decoder, KEYWORD)  # every keyword, to its layers
    told: Arguments = {KEYWORD: Handed(forward)} if passes_on else {}
    if not forward.distributed:
        return args, kwargs | told
    checks.check_decoder(args, kwargs, context)
    if context.multimodal:
        kwargs = embed_first.cut(decoder, args, kwargs, forward)
    tokens = tokens_of(kwargs, *args)
    _scale_noise(decoder, tokens, forward)
    kept = {name: value for name, value in kwargs.items() if name not in FLASH_KEYS}
    kept |= {"position_ids": _positions(kwargs, forward), "use_cache": False}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        wanted = 1 if forward.mask is None else forward.mask
        if mask.dim() != 2 or (mask is not forward.mask and not bool((mask == wanted).all())):
            raise UnsupportedError("an attention_mask that the model has made", "attention is causal", CAUSAL)
        kept["attention_mask"] = None
    if not any(parameter.name == "position_ids" for parameter in checks.parameters_of(decoder.__class__)):
        del kept["position_ids"]
    if not isinstance(mask, dict) and forward.seen:
        kept["attention_mask"] = nothing_hidden(tokens.shape[0], tokens.shape[1], tokens.device)
    return args, kept | told


def _positions(kwargs: Arguments, forward: Forward) -> torch.Tensor:
    """Return the positions that a decoder embeds: those of the forward, or the axes that it was given."""
    theirs: torch.Tensor | None = kwargs.get("position_ids")
    theirs = forward.given if theirs is None else theirs
    context, positions = forward.context, forward.positions
    assert positions is not None
    if theirs is None or (theirs is forward.given and theirs.dim() == 2):
        return positions
    if theirs.dim() == 3 or context.multimodal:  # axes, or what `embed_first.cut` made
        return theirs
    same = theirs.dim() == 2 and theirs.shape[1] == positions.shape[1] and bool((theirs == positions).all())
    if context.group and context.options.verify != "off":  # of one rank they may be right by chance
        check_same(context.group, {} if same else None, theirs[:, :0])
    if not same:
        refuse_positions(theirs)
    return positions


def _scale_noise(decoder: Any, tokens: torch.Tensor, forward: Forward) -> None:
    """Let NEFTune's noise be that of whole sequences, if a decoder embeds tokens itself.

    transformers' hook of the embeddings divides it by the length of this rank's part.
    """
    embeddings = decoder.get_input_embeddings()
    alpha: float | None = getattr(embeddings, _ALPHA, None)
    if alpha is None or forward.context.size == 1 or tokens.dim() != 2:
        return
    assert isinstance(forward.layout, Layout)
    setattr(embeddings, _ALPHA, alpha * math.sqrt(tokens.shape[1] / forward.layout.length))

    def restore(*_: Any) -> None:
        setattr(embeddings, _ALPHA, alpha)
        handle.remove()

    handle = embeddings.register_forward_hook(restore, always_call=True)  # it runs behind transformers' hook
