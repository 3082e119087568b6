"""Cut what a model hands to its decoder, and give the model itself the whole batch, but for labels.

A multimodal model embeds the whole batch on every rank. So images may lie anywhere in the sequence, across ranks too,
and every rank runs every tower: those that gather weights (ZeRO-3, FSDP) stay together. Gradients are those of a rank's
own tokens; their mean over ranks is the whole batch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.batch import OF_HOOKS, first_of, media_in, tokens_of
from dfa_megatron.huggingface.current_forward import Arguments, Forward
from dfa_megatron.huggingface.embedded_positions import has_axes, refuse_axes
from dfa_megatron.huggingface.seen import Documents, Images, Seen, refuse_positions
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import local_positions, shard_sequence

_ALONG = ("input_ids", "inputs_embeds", "token_type_ids", "visual_pos_masks", "per_layer_inputs")
"""A decoder's arguments of (batch, seq, ...); of `position_ids` the tokens are the last dimension."""

_OF_IMAGES = "deepstack_visual_embeds"
"""Features (image tokens of all rows, hidden) for some layers, at the tokens that `visual_pos_masks` marks."""

_UNCUT = ("labels", "shift_labels", "attention_mask", "position_ids")
"""Arguments that are cut already, or that the hooks replace; a mask of the model's own is refused where it is read."""

_BOTH_WAYS = {
    "gemma3": ("token_type_ids", (1,), {"full_attention", "sliding_attention"}),
    "gemma4": ("mm_token_type_ids", (1, 2), {"sliding_attention"}),
}
"""By type of model: the argument that marks images, its values there, and the kinds of layers that see both ways."""


def check_whole(decoder: Any, given: Arguments) -> None:
    """Refuse a call of a multimodal model without the tokens or the axes by which its images are found."""
    if given.get("input_ids") is None or given.get("inputs_embeds") is not None:
        raise UnsupportedError(
            "inputs_embeds, or no input_ids, for a multimodal model",
            "where its images are is found by their tokens",
            "input_ids",
        )
    positions: Any = given.get("position_ids", given["input_ids"])
    told = positions.dim() == 2 and first_of(given, ("position_ids", *OF_HOOKS)) is not None
    if told and has_axes(decoder) and media_in(given):
        refuse_axes(decoder, positions, embedded=True)


def for_model(
    model: Any, given: Arguments, rows: Documents | Seen | None
) -> tuple[Arguments, dict[str, tuple[Images, ...]] | None]:
    """Return the arguments for a model, and where images are whose tokens see each other, by kind of layer.

    The model gets no padding, no marks of such images, and no positions but those along axes: it would look for
    documents in them, and make masks of its own. Waits for the device if there are marks.
    """
    kept = {name: x for name, x in given.items() if name not in OF_HOOKS}
    name, values, kinds = _BOTH_WAYS.get(model.config.model_type, ("", (), set()))
    causal = name == "mm_token_type_ids" and model.config.get_text_config().use_bidirectional_attention != "vision"
    marks: torch.Tensor | None = None if causal else kept.pop(name, None)
    for each in ("attention_mask", "position_ids"):
        if isinstance(kept.get(each), torch.Tensor) and kept[each].dim() == 2:
            del kept[each]
    if marks is None:
        return kept, None
    seen = torch.isin(marks, torch.tensor(values, device=marks.device))
    if isinstance(mask := given.get("attention_mask"), torch.Tensor) and mask.dim() == 2:
        seen = seen & mask.bool()
    changes = torch.nn.functional.pad(seen.int(), (1, 1)).diff().cpu()
    if not bool(changes.any()):
        return kept, None
    ends = [row.nonzero().flatten().tolist() for row in changes]  # in turn where one begins, and behind it
    found = tuple(tuple(zip(row[::2], row[1::2], strict=True)) for row in ends)
    told = rows.told if isinstance(rows, Seen) else None
    edges = [span.lo for span in told.spans] if isinstance(told, Tree) else []
    if isinstance(told, Mask) or any(lo < edge < hi for row in found for lo, hi in row for edge in edges):
        raise UnsupportedError(
            "images whose tokens see each other, under a mask or over several segments of a prompt_tree",
            "a mask says by itself which tokens attend to which, and a segment's children do not see each other",
            "a mask in which images are blocks, without their marks; each image in one segment",
        )
    return kept, dict.fromkeys(kinds, found)


def cut(decoder: Any, given: Arguments, forward: Forward) -> Arguments:
    """Return this rank's part of a decoder's arguments, which are of whole sequences, with the tokens' positions."""
    group, (rows, length) = forward.context.group, tokens_of(given).shape[:2]
    known = (*_ALONG, *_UNCUT, _OF_IMAGES, *(media_in(given) if forward.context.size == 1 else ()))
    shapes = {name: [getattr(leaf, "shape", ()) for leaf in tree_leaves(x)] for name, x in given.items()}
    wide = {name for name, each in shapes.items() if any(len(shape) > 1 or length in shape for shape in each)}
    if uncut := ", ".join(sorted(wide - {*known})):
        raise UnsupportedError(
            f"{uncut} beside the tokens of a batch",
            "it would stay whole, and the decoder has this rank's part of the tokens",
            "what docs/huggingface.md lists; with images or sound, distribute_attention of the whole model",
        )
    kept = given | {name: shard_sequence(given[name], group=group) for name in _ALONG if given.get(name) is not None}
    theirs: torch.Tensor | None = given.get("position_ids")
    positions = forward.positions
    assert positions is not None
    if theirs is not None and theirs.dim() == 2:  # the model's own: `for_model` took the batch's out
        if has_axes(decoder):
            refuse_axes(decoder, theirs, embedded=given.get("inputs_embeds") is not None)
        if not bool((theirs == torch.arange(length, device=theirs.device)).all()):
            refuse_positions(theirs)
    alike = positions.expand(4, rows, -1)  # as text counts along all axes
    if theirs is not None and theirs.dim() == 3 and (forward.axes or not has_axes(decoder)):
        kept["position_ids"] = torch.cat((alike[:1], shard_sequence(theirs[-3:], group=group, dim=-1)))
    else:
        kept["position_ids"] = alike if has_axes(decoder) else positions
    if (features := given.get(_OF_IMAGES)) is not None:
        marked = given["visual_pos_masks"]
        mine = torch.zeros_like(marked)
        mine[:, local_positions(length, group=group, device=marked.device)] = True
        kept[_OF_IMAGES] = [x[mine[marked]] for x in features]
    return kept
