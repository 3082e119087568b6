"""Make the `Forward` of a call from its arguments, and give the decoder its inputs.

`begin` is a forward pre-hook of a model, `prepare` one of its decoder, which may be called alone.
While attention is the model's own, they only say so.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from dataclasses import replace
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.attention_function import nothing_hidden
from dfa_megatron.huggingface.checkpointing import keep_forward
from dfa_megatron.huggingface.checks import call_checks as checks
from dfa_megatron.huggingface.checks.padding import check_right
from dfa_megatron.huggingface.checks.wrappers import check_adapters
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    KEYWORD,
    NAME,
    WHOLE,
    Arguments,
    Forward,
    Handed,
    LayerContext,
    enter,
    forward_of_context,
)
from dfa_megatron.huggingface.hook_mixers import adopt, knows_all
from dfa_megatron.huggingface.implementation import attention_of, is_distributed, set_attention
from dfa_megatron.huggingface.multimodal import embed_first
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.positions import document_starts as packed
from dfa_megatron.huggingface.positions.batch_number import KEY
from dfa_megatron.huggingface.positions.embedded_positions import places
from dfa_megatron.huggingface.positions.seen import MASK, TREE, Seen, refuse_for, seen_in
from dfa_megatron.huggingface.recurrent.layers import layers_of
from dfa_megatron.huggingface.tiles.tiled_head import tile_of
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.runtime.comm.weights import check_weights
from dfa_megatron.sharding import shard_sequence, unshard_sequence

_OF_HOOKS = (TREE, MASK, KEY, WHOLE)
"""Keys of a call that a model's own forward does not know."""

_ALPHA = "neftune_noise_alpha"
"""The attribute of embeddings by which transformers' hook scales NEFTune's noise, over the root of length and width."""

ArgsAndKeywords = tuple[tuple[Any, ...], Arguments]


def begin(model: Any, args: tuple[Any, ...], kwargs: Arguments, *, alone: bool = False) -> ArgsAndKeywords:
    """Make the forward of a model's call, or of a decoder's that is called alone, and enter it.

    Under accelerate it is distributed in training and local in evaluation.

    Raises:
        UnsupportedError: the call asks for what is wrong on parts of sequences, or its batch is not this rank's part.
        DisagreementError: the ranks hold other weights.
    """
    context: LayerContext = getattr(model, CONTEXT)
    check_adapters(model)  # which may be added later than attention is distributed
    if context.accelerate and not context.local:
        set_attention(model, NAME if model.training else context.before)
    if not knows_all(model, context):  # layers were copied or replaced
        adopt(model, context, attention_of(model))
    if torch.is_grad_enabled():
        keep_forward(model, saving=context.options.checkpoint == "auto")
    given = checks.arguments_of(model, args, kwargs)
    tile = tile_of(model, given)
    if not is_distributed(model):
        checks.check_local(given, context)
        context.varied = True
        enter(model, Forward(context, distributed=False, tile=tile))
        return args, {name: x for name, x in kwargs.items() if name not in _OF_HOOKS}
    if WHOLE not in given:
        checks.check_parallelism()
    checks.check_generation(given, context)
    if context.group and not context.compared and context.options.verify != "off":
        check_weights(model, context.group)
        context.compared = True
    try:
        kept, forward = _shared(model, given, alone=alone)
    except UnsupportedError:  # on this rank alone before the ranks compare their batches, and on all from then on
        if context.options.verify != "off" and not (context.multimodal and alone):
            device = next(x.device for x in given.values() if isinstance(x, torch.Tensor))
            batch_number.check_same(None, context.group, device, batch_number.REFUSED)
        raise
    context.varied = context.varied or forward.seen is not None
    enter(model, replace(forward, tile=tile, whole=given.get(WHOLE)))
    return (), kept


def _shared(model: Any, given: Arguments, *, alone: bool) -> tuple[Arguments, Forward]:
    """Return the arguments for a model, or for a decoder that is called alone, and the forward of its one sequence."""
    context: LayerContext = getattr(model, CONTEXT)
    decoder = model if alone else model.get_decoder()
    checks.check_loss(model, given, context)
    checks.check_part(given, context)
    length, number = _tokens(given).shape[1], given.get(KEY)
    whole = context.multimodal and not batch_number.is_cut(number)
    layout = batch_number.layout_of_rows(number, length, context.size, whole=whole)
    if context.multimodal and not alone:
        given = embed_first.take_whole(decoder, given, context)
        forward = _forward_of(decoder, given, layout)
        kept, images = embed_first.for_model(model, given, forward.seen)
        forward = replace(forward, images=images)
    else:
        kept, forward = given, _forward_of(decoder, given, layout)
    return {name: x for name, x in kept.items() if name not in _OF_HOOKS}, forward


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
    if not forward.distributed:
        return args, kwargs
    checks.check_decoder(args, kwargs, context)
    if context.multimodal:
        kwargs = embed_first.cut(decoder, args, kwargs, forward)
    tokens = _tokens(kwargs, *args)
    _scale_noise(decoder, tokens, forward)
    kept = {name: value for name, value in kwargs.items() if name not in packed.FLASH_KEYS}
    kept |= {"position_ids": _positions(kwargs, forward), "use_cache": False}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        if mask is not forward.mask:
            check_right(mask, context.group)
        kept["attention_mask"] = None
    parameters = checks.parameters_of(decoder.__class__)
    if not any(parameter.name == "position_ids" for parameter in parameters):
        del kept["position_ids"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        kept[KEYWORD] = Handed(forward)  # the decoder passes every keyword to its layers
    if not isinstance(mask, dict) and forward.seen:
        kept["attention_mask"] = nothing_hidden(tokens.shape[0], tokens.shape[1], tokens.device)
    return args, kept


def _tokens(given: Arguments, *args: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = next(x for x in (given.get("input_ids"), given.get("inputs_embeds"), *args) if x is not None)
    return found


def _check_seen(seen: packed.Documents | Seen | None, decoder: Any) -> None:
    """Refuse a mask for a model whose states follow the tokens of the pack."""
    if isinstance(seen, Seen) and isinstance(seen.told, Mask) and (layers := layers_of(decoder)):
        refuse_for(f"a layer of type {type(layers[0]).__name__} with a state")


def _forward_of(decoder: Any, given: Arguments, layout: Layout) -> Forward:
    """Return the forward of a batch: of this rank's part, or for a multimodal model of the whole sequences."""
    context: LayerContext = getattr(decoder, CONTEXT)
    tokens = _tokens(given)
    stated, mask = given.get("position_ids"), given.get("attention_mask")
    mask = mask if isinstance(mask, torch.Tensor) else None
    find = _whole_rows if context.multimodal else _part_of_rows
    seen, positions = find(decoder, given, tokens, layout.length)
    _check_seen(seen, decoder)
    if context.multimodal:
        stated = stated if stated is not None and stated.dim() == 2 else None
        mask = shard_sequence(mask, group=context.group) if mask is not None and mask.dim() == 2 else None
    if mask is not None:
        check_right(mask, context.group, checks.first_of(given, checks.LABELS))
    longest = seen.longest if isinstance(seen, Seen) else max(map(packed.longest, seen or ((0, layout.length),)))
    return Forward(
        context,
        distributed=True,
        seen=seen,
        given=stated,
        positions=positions,
        longest=longest,
        mask=mask,
        layout=layout,
    )


def _whole_rows(
    decoder: Any, given: Arguments, tokens: torch.Tensor, length: int
) -> tuple[packed.Documents | Seen | None, torch.Tensor]:
    """Return what whole rows see, which are the same on every rank, and the positions of this rank's tokens."""
    context: LayerContext = getattr(decoder, CONTEXT)
    stated = places(decoder, given, whole=True)
    checked = context.options.verify != "off" or checks.first_of(given, (TREE, MASK)) is not None
    found = seen_in(given, stated if checked else None, tokens, length)
    if found is None:
        assert stated is not None
        checks.refuse_positions(stated, context, length)
    return found[0], shard_sequence(found[1] if stated is None else stated, group=context.group)


def _part_of_rows(
    decoder: Any, given: Arguments, tokens: torch.Tensor, length: int
) -> tuple[packed.Documents | Seen | None, torch.Tensor]:
    """Return what the rows see of which this rank holds a part, and the positions of its tokens; collective.

    The ranks tell one another whether each holds the positions that the batch tells, or those of one sequence. They
    exchange their positions only if one does not. Only a single rank may omit the positions: code that omits them does
    not slice sequences, and its whole batch would be treated as a part.
    """
    context: LayerContext = getattr(decoder, CONTEXT)
    stated, number = places(decoder, given, whole=False), given.get(KEY)
    if stated is None and context.size > 1:
        raise UnsupportedError(
            f"a batch without position_ids on {context.size} ranks",
            "each rank takes its part of a sequence, and the batch does not show that it is a part",
            checks.CUT,
        )
    found = seen_in(given, None, tokens, length)
    assert found is not None
    mine = shard_sequence(found[1], group=context.group)
    stated = mine if stated is None else stated
    if context.options.verify != "off":
        fits = stated.dim() == 2 and stated.shape[1] == mine.shape[1]
        other = torch.full((), 2, device=mine.device) if not fits else (stated != mine).any().long()
        worst = batch_number.check_same(number, context.group, mine.device, other)
        if worst == 2:
            checks.refuse_positions(stated, context, length)
        exchanged = worst == 1
    else:
        exchanged = given.get(MASK) is not None
        # A document that begins amid this rank's tokens is seen by the layers.
        if found[0] is None and bool((stated[..., :1] != mine[:, :1]).any()):
            checks.refuse_positions(stated, context, length)
    if exchanged:
        whole = unshard_sequence(stated, group=context.group)
        if whole.shape[1] != length:
            raise UnsupportedError(
                f"rows of {whole.shape[1]} tokens without {KEY}",
                "no rank can tell the length of a row from its own part",
                "every key of a batch of dfa_megatron.huggingface.shard_batch",
            )
        found = seen_in(given, whole, tokens, length)
        if found is None:
            checks.refuse_positions(stated, context, length)
        if number is None and isinstance(found[0], tuple):
            _warn_of_repeated(whole, mine.shape[1])
    return found[0], stated


def _warn_of_repeated(positions: torch.Tensor, local: int) -> None:
    """Warn of positions (batch or 1, length) that begin at 0 on every rank, which holds so many tokens."""
    if bool((positions == torch.arange(positions.shape[1], device=positions.device) % local).all()):
        _warn(
            f"dfa: position_ids begin at 0 on every rank, which means documents of {local} tokens. Parts of longer "
            "sequences have the positions of these: dfa_megatron.huggingface.shard_batch cuts them"
        )


_warn = functools.cache(logging.getLogger(__name__).warning)


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
    assert isinstance(forward.layout, Layout)
    if context.options.verify != "off":
        other = not checks.equal(theirs, positions)
        if batch_number.check_same(None, context.group, positions.device, other):
            checks.refuse_positions(theirs, context, forward.layout.length)
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
