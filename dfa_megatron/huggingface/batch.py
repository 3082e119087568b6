"""From a batch of whole sequences to this rank's part: labels are shifted before they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from zlib import crc32

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checks.padding import IGNORED, check_right
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.positions import document_starts as packed
from dfa_megatron.huggingface.positions.seen import MASK, TREE, Seen, seen_in
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.comm.groups import Group, group_size
from dfa_megatron.sharding import shard_sequence

TYPE_IDS = "token_type_ids"
"""The key of a number for each token, which tokenizers bring for text, and processors with images."""

KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", TYPE_IDS, *packed.FLASH_KEYS, TREE, MASK)
"""What may be in a batch of text."""

MEDIA = (
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("second_per_grid_ts", "image_position_ids", "video_position_ids", "mm_token_type_ids"),
    *("input_features", "input_features_mask", "feature_attention_mask"),
)
"""What processors of images, video and sound bring beside the tokens; it stays whole."""


def shard_batch(batch: Mapping[str, Any], *, group: Group = None) -> dict[str, Any]:
    """Return this rank's model inputs from a batch that is the same on every rank of the group.

    A DistributedSampler, which gives each rank other samples, must count groups in place of ranks.

    Args:
        batch: "input_ids" (batch, seq) and, if wanted, "labels" (batch, seq), not shifted, -100 where there is no loss.
            As in transformers, the last token of a document is trained on the next one's first, unless that label is
            -100. "attention_mask" may be there with padding on the right, whose labels are -100; it is checked, and
            kept only for losses that count tokens, because a causal mask hides padding. "position_ids" (batch or 1,
            seq) may be there; they restart at 0 where a document of a packed row begins. "cu_seq_lens_q",
            "cu_seq_lens_k", as transformers' padding-free collators make them, say the same. In place of both,
            "prompt_tree" may hold (lengths, parents) of segments that share prefixes, as `masks.prompt_tree` takes
            them, or "mask" any value of `dfa_megatron.masks`, with any "position_ids" (1, seq), by default 0 to
            seq - 1. All rows have them. "token_type_ids" (batch, seq) go with the tokens. With `MEDIA`, such as
            "pixel_values", the batch is for a multimodal model, which embeds whole sequences; "position_ids" of a
            model that embeds axes may have the shape (4, batch, seq), places first; text needs none.
        group: the ranks that share the sequence. Where they do not divide seq, the first ones hold one token more.

    Returns:
        "input_ids" and "position_ids" (batch or 1, local_seq), and with labels: "labels" = "shift_labels", the label of
        the *next* token, across the boundaries between ranks; "num_items_in_batch", the labelled tokens of all ranks
        divided by P: a float, since FSDP's mixed precision rounds tensors. With these a transformers model computes
        `causal_lm_loss` by itself. Of packed documents also "cu_seq_lens_q" = "cu_seq_lens_k", int32 (documents + 1) on
        the CPU: offsets into the whole rows, one row after another. There they cost no synchronisation. On several
        ranks "dfa_batch_number", by which the model's forward finds that the ranks had the same batch. For a multimodal
        model, "input_ids" and "position_ids", if documents or axes need them, are whole, and so is what else was in the
        batch.

    Raises:
        UnsupportedError: padding elsewhere or with labels, positions that are not those of documents, or an unknown
            key.
    """
    if set(batch) - {*KNOWN, *MEDIA} or "input_ids" not in batch:
        refuse_batch(batch)
    tokens = batch["input_ids"]
    if (mask := batch.get("attention_mask")) is not None:
        check_right(mask, labels=batch.get("labels"))
    others = {name: batch[name] for name in MEDIA if name in batch}
    types = {TYPE_IDS: batch[TYPE_IDS]} if batch.get(TYPE_IDS) is not None else {}
    positions = batch.get("position_ids")
    axes = positions if positions is not None and positions.dim() == 3 else None
    if axes is not None:
        if axes.shape[0] != 4:
            _refuse_positions()
        positions = axes[0]
    if (found := seen_in(batch, positions, tokens, tokens.shape[1])) is None:
        _refuse_positions()
    seen, positions = found
    size = group_size(group)
    if others:
        local = {"input_ids": tokens, **types, **others}
        if axes is not None or seen is not None:
            local["position_ids"] = positions if axes is None else axes
    else:
        given = {"input_ids": tokens, "position_ids": positions if axes is None else axes, **types}
        local = {name: shard_sequence(x, group=group, dim=-1) for name, x in given.items()}
    told = {TREE if isinstance(seen.told, Tree) else MASK: seen.told} if isinstance(seen, Seen) else {}
    local |= told
    if isinstance(seen, tuple) and not others:
        local["cu_seq_lens_q"] = local["cu_seq_lens_k"] = packed.offsets_of_rows(seen)
    if mask is not None and not bool(mask.all()):
        local["attention_mask"] = mask if others else shard_sequence(mask, group=group)
    if "labels" in batch:
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        local["labels"] = local["shift_labels"] = shard_sequence(shifted.contiguous(), group=group)
        local["num_items_in_batch"] = max(int((shifted != IGNORED).sum()), 1) / size
    if size > 1:
        known = {name: x for name, x in batch.items() if name not in (TREE, MASK)}
        known |= {name: [crc32(repr(each).encode())] for name, each in told.items()}
        local[batch_number.KEY] = batch_number.number_of(known, length=0 if others else tokens.shape[1])
    return local


def refuse_batch(batch: Iterable[str]) -> NoReturn:
    """Refuse a batch with these keys.

    Raises:
        UnsupportedError: always.
    """
    keys, why, instead = ", ".join(batch) or "nothing", "it is not known how to cut it", "input_ids and labels"
    if {batch_number.KEY, "shift_labels"} & {*batch}:
        why = "it is a part already, which shard_batch has made"
        instead = "the model, given the part; distribute_trainer and distribute_accelerator take whole batches"
    raise UnsupportedError(f"a batch of {keys}", why, instead)


def _refuse_positions() -> NoReturn:
    raise UnsupportedError(
        "position_ids that are not those of documents, or of a tree, or the same in all rows of a mask",
        "each document, and so each row, must begin at 0 and go up by 1",
        "as DataCollatorWithFlattening of transformers makes them, or none for one document a sequence; for models "
        "with axes (4, batch, seq), these first",
    )
