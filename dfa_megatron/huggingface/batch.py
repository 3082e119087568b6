"""From a whole batch, the same on every rank of a group, to this rank's part: labels are shifted before they are cut.

The model does it at its door. A multimodal model embeds whole sequences: of its batch the labels alone are cut here.
"""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import call_checks as checks
from dfa_megatron.huggingface import document_starts as packed
from dfa_megatron.huggingface.current_forward import Arguments, Forward, LayerContext
from dfa_megatron.huggingface.embedded_positions import places, refuse_positions
from dfa_megatron.huggingface.padding import IGNORED, check_right, next_labels
from dfa_megatron.huggingface.recurrent.layers import layers_of
from dfa_megatron.huggingface.same_batch import EMBEDDED
from dfa_megatron.huggingface.seen import MASK, TREE, Seen, refuse_for, seen_in
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.sharding import shard_sequence

OF_HOOKS = (TREE, MASK, *packed.FLASH_KEYS)
"""Keys of a batch that say what its tokens see, and that a model does not get."""

TYPE_IDS = "token_type_ids"
"""The key of a number for each token, which tokenizers bring for text, and processors with images."""

OF_TOKENS = (
    *("input_ids", EMBEDDED, *checks.LABELS, "attention_mask", "position_ids", TYPE_IDS, *OF_HOOKS),
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("second_per_grid_ts", "image_position_ids", "video_position_ids", "mm_token_type_ids"),
    *("input_features", "input_features_mask", "feature_attention_mask", "num_items_in_batch"),
)
"""What a batch says of its tokens, images and sound, which the ranks compare."""

_OF_TEXT = ("input_ids", EMBEDDED, TYPE_IDS)
"""The keys of a text model's batch that are cut as they are, along their second dimension."""

LARGEST = 2**30
"""Bytes of whole `inputs_embeds`: beyond, every rank would hold what the ranks are to share."""


def tokens_of(given: Arguments, *args: torch.Tensor) -> torch.Tensor:
    """Return input_ids (batch, seq) or inputs_embeds (batch, seq, hidden) of a call."""
    found = next((x for x in (given.get("input_ids"), given.get(EMBEDDED), *args) if x is not None), None)
    if found is None:
        raise UnsupportedError("a call without tokens", "there is nothing to attend to", "input_ids")
    return found


def forward_of_batch(decoder: Any, given: Arguments, context: LayerContext) -> Forward:
    """Return the forward of a whole batch. Nothing is exchanged.

    Raises:
        UnsupportedError: padding elsewhere than on the right or with labels; positions that are not those of documents;
            a tree or a mask that does not fit.
    """
    tokens = tokens_of(given)
    rows, length = tokens.shape[:2]
    if tokens.is_floating_point() and context.size > 1 and (size := tokens.nbytes) > LARGEST:
        raise UnsupportedError(
            f"inputs_embeds of {size / LARGEST:.1f} GiB",
            "every rank would hold those of the whole batch",
            "input_ids, of which the model embeds this rank's part; or a smaller batch",
        )
    layout = _layout(length, context.size)
    mask = given.get("attention_mask")
    mask = mask if isinstance(mask, torch.Tensor) and (mask.dim() == 2 or not context.multimodal) else None
    if mask is not None:
        check_right(mask, given.get("labels"))
    stated = places(decoder, given, whole=context.multimodal)
    if stated is not None and stated.dim() != 2:
        refuse_positions(stated)
    found = seen_in(given, stated, tokens, length)
    if found is None:
        refuse_positions(stated)
    seen, positions = found
    if isinstance(seen, Seen) and isinstance(seen.told, Mask) and (layers := layers_of(decoder)):
        refuse_for(f"a layer of type {type(layers[0]).__name__} with a state")
    mine = shard_sequence(positions, group=context.group)
    handed: torch.Tensor | None = given.get("position_ids")
    if not context.multimodal:
        handed = mine if handed is None or handed.dim() == 2 else shard_sequence(handed, group=context.group, dim=-1)
    elif handed is not None and handed.dim() == 3:  # along axes, which the model hands on
        handed = None
    labels = checks.first_of(given, checks.LABELS)
    return Forward(
        context,
        distributed=True,
        seen=seen,
        given=handed,
        positions=mine,
        longest=seen.longest if isinstance(seen, Seen) else max(map(packed.longest, seen or ((0, length),))),
        mask=None if mask is None else shard_sequence(mask, group=context.group),
        layout=layout,
        rows=rows,
        labelled=None if labels is None else (_shifted(given) != IGNORED).any(),
    )


def part_of(model: Any, given: Arguments, forward: Forward) -> Arguments:
    """Return the arguments of a text model for this rank's part of a batch.

    Raises:
        UnsupportedError: an argument that may have tokens of the whole sequence is not known.
    """
    group, length = forward.context.group, tokens_of(given).shape[1]
    kept = {name: x for name, x in given.items() if name not in OF_HOOKS}
    known = {*_OF_TEXT, *checks.LABELS, "attention_mask", "position_ids"}
    whole = [
        name for name, x in kept.items() if isinstance(x, torch.Tensor) and length in x.shape and name not in known
    ]
    if whole:
        raise UnsupportedError(
            f"{', '.join(whole)} beside the tokens of a batch",
            "it would stay whole, and the model has this rank's part of the tokens",
            "what docs/huggingface.md lists",
        )
    for name in {*_OF_TEXT} & {*kept}:
        if kept[name] is not None:
            kept[name] = shard_sequence(kept[name], group=group)
    if isinstance(mask := kept.get("attention_mask"), torch.Tensor):
        kept["attention_mask"] = None if bool(mask.all()) else forward.mask  # for losses that count tokens
    if checks.takes(model, "position_ids"):
        kept["position_ids"] = forward.given
    return kept


def cut_labels(given: Arguments, context: LayerContext) -> Arguments:
    """Return the arguments with this rank's part of the next tokens' labels, and its share of their number.

    Mixed precision of FSDP rounds tensors, so the number is Python's.
    """
    if checks.first_of(given, checks.LABELS) is None:
        return given
    shifted, count = _shifted(given), given.get("num_items_in_batch")
    count = (shifted != IGNORED).sum() if count is None else count
    part = shard_sequence(shifted, group=context.group)
    count = (float(count) or 1.0) / context.size
    return given | {"labels": part, "shift_labels": part, "num_items_in_batch": count}


def _shifted(given: Arguments) -> torch.Tensor:
    """Return the label of the next token (batch, seq), as a batch has it or made of its labels."""
    shifted: torch.Tensor | None = given.get("shift_labels")
    return next_labels(given["labels"]) if shifted is None else shifted


def _layout(length: int, ranks: int) -> Layout:
    """Return the tokens of a row that every rank holds; the first ones hold one more.

    Raises:
        UnsupportedError: a rank holds none.
    """
    if length < ranks:
        raise UnsupportedError(
            f"rows of {length or 'no'} tokens on {ranks} ranks",
            "a rank would have none, of which layers of transformers make no heads",
            "at least as many tokens as ranks",
        )
    return contiguous(length, ranks)
