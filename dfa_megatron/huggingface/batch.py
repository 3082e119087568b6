"""What a whole batch says, the same on every rank of a group; its labels are shifted, and then cut.

Padding is on the right and needs no mask: under a causal mask later tokens do not affect a token. Its outputs differ
from those of an attention that masks it; nobody uses them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.current_forward import Arguments, Forward, LayerContext
from dfa_megatron.huggingface.embedded_positions import places
from dfa_megatron.huggingface.seen import FLASH_KEYS, Seen, longest_of, seen_in
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.plan.language.layout import contiguous
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import local_positions, shard_sequence
from dfa_megatron.whole_batch import MASK, TREE

CAUSAL = "causal self-attention over whole, unpadded sequences"

EMBEDDED = "inputs_embeds"

LABELS = ("shift_labels", "labels")

OF_HOOKS = (TREE, MASK, *FLASH_KEYS)
"""Keys of a batch that say what its tokens see, and that a model does not get."""

_MEDIA = ("pixel_values", "pixel_values_videos", "input_features")
"""Endings of the names of arguments for images and sound."""

LARGEST = 2**30
"""Bytes of whole `inputs_embeds`: beyond, every rank would hold what the ranks are to share."""


@functools.cache
def names_of(model: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a class's forward."""
    return tuple(inspect.signature(model.forward).parameters)


def arguments_of(module: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Return the arguments of a call, positional ones too, by their names in the forward of the module's class."""
    return dict(zip(names_of(module.__class__)[1:], args, strict=False)) | kwargs  # without self


def first_of(given: Arguments, names: tuple[str, ...]) -> Any:
    """Return the first of some arguments that a call brings, None if it brings none of them."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def media_in(given: Arguments) -> list[str]:
    """Return the names of the images and the sound of a call."""
    return [name for name in given if name.endswith(_MEDIA) and given[name] is not None]


def tokens_of(given: Arguments) -> torch.Tensor:
    """Return input_ids (batch, seq) or inputs_embeds (batch, seq, hidden) of a call."""
    found: torch.Tensor | None = first_of(given, ("input_ids", EMBEDDED))
    if found is None:
        raise UnsupportedError("a call without tokens", "there is nothing to attend to", "input_ids")
    return found


def told(given: Arguments) -> Arguments:
    """Return what the ranks compare of a call, the tokens first: all numbers, of images and sound their shapes."""
    found = {}
    for name in sorted(given, key=lambda name: name not in ("input_ids", EMBEDDED)):
        x = given[name]
        floats = isinstance(x, torch.Tensor) and x.is_floating_point() and name != EMBEDDED
        if floats and (x.dim() > 2 or name.endswith((*_MEDIA, "second_per_grid_ts"))):
            x = [*x.shape]  # images and sound go with their tokens
        if _is_data(x):
            found[name] = x
    return found


def _is_data(x: Any) -> bool:
    """Return whether an argument is numbers, or says what tokens see; a switch is neither."""
    if isinstance(x, list | tuple):
        return all(map(_is_data, x))
    return isinstance(x, torch.Tensor | Tree | Mask | int | float) and not isinstance(x, bool)


def forward_of_batch(decoder: Any, given: Arguments, shifted: torch.Tensor | None, context: LayerContext) -> Forward:
    """Return the forward of a whole batch, with the next tokens' labels if it has some. Nothing is exchanged."""
    tokens = tokens_of(given)
    rows, length = tokens.shape[:2]
    if tokens.is_floating_point() and context.size > 1 and (size := tokens.nbytes) > LARGEST:
        raise UnsupportedError(
            f"inputs_embeds of {size / LARGEST:.1f} GiB",
            "every rank would hold those of the whole batch",
            "input_ids, of which the model embeds this rank's part; or a smaller batch",
        )
    if length < context.size:
        raise UnsupportedError(
            f"rows of {length or 'no'} tokens on {context.size} ranks",
            "a rank would have none, of which layers of transformers make no heads",
            "at least as many tokens as ranks",
        )
    layout = contiguous(length, context.size)  # the first ranks hold one more
    mask = given.get("attention_mask")
    mask = mask if isinstance(mask, torch.Tensor) else None
    if mask is not None:
        _check_right(mask, first_of(given, LABELS))
    count = given.get("num_items_in_batch")
    labelled = None if shifted is None else (shifted != IGNORED).any() if count is None else torch.as_tensor(count > 0)
    seen = seen_in(given, places(decoder, given, whole=context.multimodal), rows, length)
    device, documents = tokens.device, ((0, length),) if seen is None else seen
    if isinstance(documents, Seen):
        positions = shard_sequence(documents.positions(device), group=context.group)
    else:
        positions = local_positions(length, group=context.group, layout=layout, device=device, cu_seqlens=documents)
    return Forward(
        context,
        distributed=True,
        seen=seen,
        positions=positions,
        axes=bool(media_in(given)) or getattr(given.get("position_ids"), "ndim", 0) == 3,
        longest=longest_of(seen, length),
        mask=None if mask is None else shard_sequence(mask, group=context.group),
        layout=layout,
        rows=rows,
        labelled=labelled,
    )


def _check_right(mask: torch.Tensor, labels: torch.Tensor | None) -> None:
    """Refuse a mask (batch, seq), 0 for padding, that hides other tokens than the unlabelled ends of sequences."""
    if mask.dim() != 2:
        raise UnsupportedError("a ready-made attention mask", "attention is causal by construction", CAUSAL)
    real = mask.bool()
    other = mask != real.to(mask.dtype)
    labelled = torch.zeros_like(real) if labels is None else (labels != IGNORED) & ~real
    if bool(other.any()):
        raise UnsupportedError(
            "an attention_mask with other values than 0 and 1",
            "transformers takes each of them for a token to attend to: numbered documents would see each other, and "
            "what is added to scores would not be",
            "1 for tokens and 0 for padding; position_ids that begin at 0 in each document, or cu_seq_lens_q",
        )
    if bool((real[:, 1:] > real[:, :-1]).any()):
        raise UnsupportedError(
            "an attention_mask with padding that is not on the right",
            "padded tokens would be attended to",
            "tokenizer.padding_side='right', or sequences without padding",
        )
    if bool(labelled.any()):
        raise UnsupportedError(
            "labels of padded tokens",
            "an attention that masks padding would give them another output",
            "the label -100 for padding, as transformers' collators write it",
        )


def cut_labels(shifted: torch.Tensor | None, count: torch.Tensor | int | None, context: LayerContext) -> Arguments:
    """Return the arguments of this rank's part of the next tokens' labels, and its share of their number.

    `labels` is empty, and only says that there are some. A loss reads `shift_labels`; one that reads `labels` fails.
    Mixed precision of FSDP rounds tensors, so the number is Python's.
    """
    if shifted is None:
        return {}
    count = (shifted != IGNORED).sum() if count is None else count
    part = shard_sequence(shifted, group=context.group)
    return {"labels": part[:, :0], "shift_labels": part, "num_items_in_batch": (float(count) or 1.0) / context.size}


def next_labels(labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Return the label of the next token of each token, (batch, seq); `ignored` for the last."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()
