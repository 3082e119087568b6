"""Embed first, then shard: a model of several parts embeds the whole batch on every rank, then its decoder's is cut.

So images may lie anywhere in the sequence, across ranks too, and every rank runs every tower: those that gather weights
(ZeRO-3, FSDP) stay together. Gradients are those of a rank's own tokens; their mean over ranks is the whole batch's.
"""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.batch import TYPE_IDS
from dfa_megatron.huggingface.layer_context import CONTEXT, LayerContext
from dfa_megatron.huggingface.padding import check_right, gathered
from dfa_megatron.huggingface.parts.image_masks import IMAGES, take_images
from dfa_megatron.huggingface.parts.text_part import is_distributed
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.positions.embedded_positions import has_axes, refuse_axes
from dfa_megatron.sharding import local_positions, shard_sequence

_ALONG = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "visual_pos_masks": 1, "per_layer_inputs": 1}
"""The dimension of tokens in a decoder's arguments."""

_OF_IMAGES = "deepstack_visual_embeds"
"""Features (image tokens of all rows, hidden) for some layers, at the tokens that `visual_pos_masks` marks."""

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments that a whole model hands on to its decoder, which has no use for them."""


def take_whole(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check that a model of several parts is given whole sequences, and note what its decoder is to be told.

    A forward pre-hook. The ranks compare a number made of their tokens.

    Raises:
        UnsupportedError: other tokens than the other ranks', embeddings, or padding that is not on the right.
    """
    context: LayerContext = getattr(module, CONTEXT)
    if not is_distributed(module):
        return None
    tokens: torch.Tensor | None = kwargs.get("input_ids", args[0] if args else None)
    check_by_name(args[1:])
    if tokens is None or kwargs.get("inputs_embeds") is not None:
        raise UnsupportedError(
            "inputs_embeds, or no input_ids, for a model of several parts",
            "the ranks compare their tokens, so that each is known to have the whole sequences",
            "input_ids",
        )
    kept = dict(kwargs)
    number: torch.Tensor | None = context.current.told.get(batch_number.KEY)
    if batch_number.is_cut(number):
        kept |= tokens_of_text(kept, context)
        tokens = kept["input_ids"]
    _check_same(tokens, number, context)
    if (mask := kept.get("attention_mask")) is not None and mask.dim() == 2:
        check_right(kept.pop("attention_mask"))
    told: dict[str, Any] = {IMAGES: take_images(module, kept)}
    positions: torch.Tensor | None = kept.get("position_ids")
    if positions is not None and positions.dim() == 2:
        # Models would look for documents in them, and make masks of their own.
        decoder = module.get_decoder()
        if has_axes(decoder):
            refuse_axes(decoder, positions, embedded=True)
        told["position_ids"] = kept.pop("position_ids").expand(tokens.shape[0], -1)
    context.current.told = told
    return args, kept


def tokens_of_text(given: dict[str, Any], context: LayerContext) -> dict[str, Any]:
    """Return the whole sequences of a batch of text, which `shard_batch` cut; collective."""
    whole = {
        name: torch.cat(gathered(given[name], context.group), 1)
        for name in ("input_ids", TYPE_IDS)
        if given.get(name) is not None
    }
    told = dict.fromkeys({"position_ids", "cu_seq_lens_q", "cu_seq_lens_k"} & {*given})  # by positions alone
    if given.get("cu_seq_lens_q") is not None:
        told["position_ids"] = torch.cat(gathered(given["position_ids"], context.group), 1)
    return whole | told


def cut(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: LayerContext) -> dict[str, Any]:
    """Return this rank's part of a decoder's arguments, which are of whole sequences.

    Raises:
        UnsupportedError: an argument that may have tokens of the whole sequence is not known.
    """
    check_by_name(args)
    known = (*_ALONG, *_OF_LOSS, _OF_IMAGES)
    uncut = ", ".join(name for name, x in kwargs.items() if _has_tensors(x) and name not in known)
    if uncut:
        raise UnsupportedError(
            f"{uncut} for the decoder of a model of several parts",
            "it is not known whether they have the tokens of the whole sequence",
            "a model that hands on inputs_embeds, position_ids and the features of images alone",
        )
    group = context.group
    tokens = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    rows, length = tokens.shape[:2]
    kept = kwargs | {
        name: shard_sequence(kwargs[name], group=group, dim=dim)
        for name, dim in _ALONG.items()
        if kwargs.get(name) is not None
    }
    plain = local_positions(length, group=group, device=tokens.device)[None]
    axes: torch.Tensor | None = kept.get("position_ids")
    if axes is None:
        kept["position_ids"] = plain.expand(4, rows, -1) if has_axes(module) else plain
    elif axes.dim() == 3 and axes.shape[0] == 3:  # of a tower's own: beside them the places of tokens
        kept["position_ids"] = torch.cat((plain.expand(1, rows, -1), axes))
    if (features := kwargs.get(_OF_IMAGES)) is not None:
        marked = kwargs["visual_pos_masks"]
        mine = torch.zeros_like(marked)
        mine[:, local_positions(length, group=group, device=marked.device)] = True
        kept[_OF_IMAGES] = [x[mine[marked]] for x in features]
    return kept


def check_by_name(args: tuple[Any, ...]) -> None:
    """Refuse positional arguments, in which nothing is looked for.

    Raises:
        UnsupportedError: there are some.
    """
    if args:
        raise UnsupportedError(
            "positional arguments after input_ids", "positions and caches are looked for by name", "keyword arguments"
        )


def _has_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(x, torch.Tensor) for x in values)


def _check_same(tokens: torch.Tensor, number: torch.Tensor | None, context: LayerContext) -> None:
    """Compare the tokens of the ranks, and the whole batches that `shard_batch` was given, by one number each."""
    if context.size == 1 or context.options.verify == "off":
        return
    own = batch_number.number_of({"input_ids": tokens}, cut=False)
    _, tokens_differ, differs = batch_number.compare(own, number, group=context.group, device=tokens.device)
    if tokens_differ:
        raise UnsupportedError(
            f"other input_ids than those of another of {context.size} ranks",
            "a model of several parts embeds whole sequences on every rank, and its decoder's are cut",
            "dfa_megatron.huggingface.shard_batch of a batch with pixel_values, mm_token_type_ids or the like, the "
            "same on every rank",
        )
    if differs:
        batch_number.refuse_different_batches()
