"""Make the `Forward` of a call from its arguments, and give the decoder its inputs.

`begin` is a forward pre-hook of a model, `prepare` one of its decoder, which may be called alone.
While attention is the model's own, they only say so.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.attention_function import nothing_hidden
from dfa_megatron.huggingface.checkpointing import keep_forward
from dfa_megatron.huggingface.checks import call_checks as checks
from dfa_megatron.huggingface.checks.check_pair import is_pair
from dfa_megatron.huggingface.checks.padding import check_right
from dfa_megatron.huggingface.checks.wrappers import check_adapters
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    KEYWORD,
    NAME,
    WHOLE,
    Arguments,
    Forward,
    LayerContext,
    enter,
    forward_of_context,
)
from dfa_megatron.huggingface.encoder_decoder import pair
from dfa_megatron.huggingface.implementation import is_distributed, set_attention
from dfa_megatron.huggingface.multimodal import embed_first
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.positions import document_starts as packed
from dfa_megatron.huggingface.positions.embedded_positions import after_padding, padding_of, places
from dfa_megatron.huggingface.positions.seen import MASK, TREE, Seen, refuse_for, seen_of, told_of
from dfa_megatron.huggingface.recurrent.layers import layers_of
from dfa_megatron.huggingface.tiles.tiled_head import tile_of
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import local_positions, shard_sequence, unshard_sequence

_OF_HOOKS = (TREE, MASK, batch_number.KEY, WHOLE)
"""Keys of a call that a model's own forward does not know."""

_ALPHA = "neftune_noise_alpha"
"""The attribute of embeddings by which transformers' hook scales NEFTune's noise, over the root of length and width."""

ArgsAndKeywords = tuple[tuple[Any, ...], Arguments]


def begin(model: Any, args: tuple[Any, ...], kwargs: Arguments, *, alone: bool = False) -> ArgsAndKeywords:
    """Make the forward of a model's call, or of a decoder's that is called alone, and enter it.

    Under accelerate it is distributed in training and local in evaluation.

    Raises:
        UnsupportedError: the call asks for what is wrong on parts of sequences, or its batch is not this rank's part.
    """
    context: LayerContext = getattr(model, CONTEXT)
    check_adapters(model)  # which may be added later than attention is distributed
    follows = context.accelerate and not context.local
    if follows:
        set_attention(model, NAME if model.training else context.before)
    if torch.is_grad_enabled():
        keep_forward(model, saving=context.saving)
    given = checks.arguments_of(model, args, kwargs)
    tile, kept = tile_of(model, given), {name: x for name, x in kwargs.items() if name not in _OF_HOOKS}
    if not is_distributed(model):
        checks.check_local(given, context, evaluation=follows)
        context.varied = True
        enter(model, Forward(context, distributed=False, tile=tile))
        return args, kept
    if WHOLE not in given:
        checks.check_parallelism()
    cache = checks.first_of(given, checks.CACHES)
    if getattr(cache, "spans_ranks", False):
        from dfa_megatron.huggingface.generation import steps  # which needs transformers

        given, forward = steps.begin(context, cache, given)
        enter(model, forward)
        return (), given
    try:
        if is_pair(model):
            kept, forward = pair.take_whole(model, given, context)
            args = ()
        else:
            args, kept, forward = _shared(model, args, kept, given, alone=alone)
    except UnsupportedError:  # on this rank alone before the ranks compare their batches, and on all from then on
        if context.options.verify != "off" and not (context.multimodal and alone):
            device = next(x.device for x in (*args, *given.values()) if isinstance(x, torch.Tensor))
            batch_number.check_same(None, context.group, device, batch_number.REFUSED)
        raise
    context.varied = context.varied or forward.seen is not None or forward.pair is not None
    enter(model, replace(forward, tile=tile, whole=given.get(WHOLE)))
    return args, kept


def _shared(
    model: Any, args: tuple[Any, ...], kept: Arguments, given: Arguments, *, alone: bool
) -> tuple[tuple[Any, ...], Arguments, Forward]:
    """Return the arguments for a model, or for a decoder that is called alone, and the forward of its one sequence."""
    context: LayerContext = getattr(model, CONTEXT)
    decoder = model if alone else model.get_decoder()
    checks.check_loss(model, given, context)
    checks.check_part(given, context)
    length, number = _tokens(given, args).shape[1], given.get(batch_number.KEY)
    whole = context.multimodal and not batch_number.is_cut(number)
    layout = batch_number.layout_of_rows(number, length, context.size, whole=whole)
    told = told_of(given, layout.length)
    _check_told(told, decoder)
    if context.multimodal and not alone:
        args, kept, forward = embed_first.take_whole(model, decoder, args, kept, number, told)
    elif context.multimodal:
        forward = embed_first.forward_of_whole(context, given, given.get("position_ids"), told)
    else:
        forward = _forward_of_part(decoder, context, given, args, told, layout)
    return args, kept, replace(forward, longest=_longest(forward.seen, layout.length), layout=layout)


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
    if forward.cache is not None:
        taken = {parameter.name for parameter in checks.parameters_of(decoder.__class__)}
        told = {"attention_mask": None, "position_ids": forward.positions}
        return args, kwargs | {name: value for name, value in told.items() if name in taken}
    if not forward.distributed:
        return args, kwargs
    checks.check_decoder(args, kwargs, context)
    if context.multimodal:
        kwargs = embed_first.cut(decoder, args, kwargs, forward)
    tokens = _tokens(kwargs, args)
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
        kept[KEYWORD] = forward  # the decoder passes every keyword to its layers
    if not isinstance(mask, dict) and forward.seen:
        kept["attention_mask"] = nothing_hidden(tokens.shape[0], tokens.shape[1], tokens.device)
    return args, kept


def _tokens(given: Arguments, args: tuple[Any, ...]) -> torch.Tensor:
    found: torch.Tensor = next(x for x in (given.get("input_ids"), given.get("inputs_embeds"), *args) if x is not None)
    return found


def _check_told(told: Tree | Mask | None, decoder: Any) -> None:
    """Refuse a tree or a mask for a model whose positions, or states, follow the tokens of the pack."""
    if told is not None and padding_of(decoder) is not None:
        refuse_for("a table behind its padding")
    if isinstance(told, Mask) and (layers := layers_of(decoder)):
        refuse_for(f"a layer of type {type(layers[0]).__name__} with a state")


def _forward_of_part(
    decoder: Any,
    context: LayerContext,
    given: Arguments,
    args: tuple[Any, ...],
    told: Tree | Mask | None,
    layout: Layout,
) -> Forward:
    """Return the forward of this rank's part of a batch: check by the positions that it is one, and find its documents.

    Only a single rank may omit the positions. With several ranks they are required: code that omits them does not
    slice sequences, and its whole batch would be treated as a part.
    """
    tokens, stated = _tokens(given, args), places(decoder, given)
    if stated is None and context.size > 1:
        raise UnsupportedError(
            f"a batch without position_ids on {context.size} ranks",
            "each rank takes its part of a sequence, and the batch does not show that it is a part",
            "dfa_megatron.huggingface.shard_batch, which brings them",
        )
    number = given.get(batch_number.KEY)
    seen: packed.Documents | Seen | None
    if told is None:
        seen, positions = _documents(given, stated, tokens, context, number, layout.length)
    else:
        seen, positions = _told(told, stated, tokens, context, number)
    padding = padding_of(decoder)
    if padding is not None and tokens.dim() == 2:
        assert not isinstance(seen, Seen)
        positions = after_padding(tokens, seen, padding, context.group)
    elif padding is not None:  # embeddings: none is known to be padding, as in the model itself
        positions = positions + padding + 1
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        check_right(mask, context.group, checks.first_of(given, checks.LABELS))
    return Forward(
        context,
        distributed=True,
        seen=seen,
        given=given.get("position_ids"),
        positions=positions,
        mask=mask if isinstance(mask, torch.Tensor) else None,
    )


def _told(
    told: Tree | Mask,
    stated: torch.Tensor | None,
    tokens: torch.Tensor,
    context: LayerContext,
    number: torch.Tensor | None,
) -> tuple[Seen, torch.Tensor]:
    """Return what rows see, with their positions, which the ranks exchange under a mask, and those of this rank."""
    if isinstance(told, Tree):
        positions = shard_sequence(seen_of(told).positions(tokens.device), group=context.group)
        _check_stated(stated, positions, context, number, told.length)
        return seen_of(told), positions
    plain = local_positions(told.length, group=context.group, device=tokens.device)[None]
    positions = plain if stated is None else stated
    same = positions.dim() == 2 and positions.shape[1] == plain.shape[1] and bool((positions == positions[:1]).all())
    if context.options.verify != "off" and batch_number.check_same(number, context.group, tokens.device, not same):
        checks.refuse_positions(positions, context, told.length)
    return seen_of(told, unshard_sequence(positions[:1], group=context.group)), positions


def _documents(
    given: Arguments,
    stated: torch.Tensor | None,
    tokens: torch.Tensor,
    context: LayerContext,
    number: torch.Tensor | None,
    length: int,
) -> tuple[packed.Documents | None, torch.Tensor]:
    """Return the documents of every row, None if each row is one, and the positions of this rank's tokens."""
    batch = tokens.shape[0]
    device = tokens.device if stated is None else stated.device
    plain = local_positions(length, group=context.group, device=device)[None]
    if given.get("cu_seq_lens_q") is not None or given.get("cu_seq_lens_k") is not None:
        found = packed.of_offsets(given, batch, length)
        if not packed.single(found):
            plain = shard_sequence(packed.positions_of(found, device), group=context.group)
        _check_stated(stated, plain, context, number, length)
    elif stated is None or context.options.verify == "off":
        # A document that begins amid this rank's tokens is seen by the layers.
        if stated is not None and bool((stated[..., :1] != plain[:, :1]).any()):
            checks.refuse_positions(stated, context, length)
        return None, plain if stated is None else stated
    else:
        known = packed.of_ranks(stated, plain, length, context.group, number)
        if known is None:
            checks.refuse_positions(stated, context, length)
        found = known * batch if len(known) == 1 else known
    return (None if packed.single(found) else found), plain if stated is None else stated


def _check_stated(
    stated: torch.Tensor | None,
    expected: torch.Tensor,
    context: LayerContext,
    number: torch.Tensor | None,
    length: int,
) -> None:
    """Check positions that are known: the ranks hold parts of one batch, and its positions are theirs; collective."""
    if context.options.verify == "off":
        return
    seen = expected if stated is None else stated
    if batch_number.check_same(number, context.group, expected.device, not checks.equal(seen, expected)):
        checks.refuse_positions(seen, context, length)


def _longest(seen: packed.Documents | Seen | None, length: int) -> int:
    """Return the tokens of the longest document, or path, of rows of a length."""
    if isinstance(seen, Seen):
        return seen.longest
    return max(hi - lo for offsets in seen or ((0, length),) for lo, hi in pairwise(offsets))


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
    _check_stated(theirs, positions, context, None, forward.layout.length)
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
