"""From a batch of whole sequences to this rank's part: labels are shifted before they are cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.padding import IGNORED, check_right, check_unlabelled
from dfa_megatron.packing import local_positions, shard_sequence
from dfa_megatron.runtime.channel import Group, group_name, group_size

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids")


def shard_batch(batch: Mapping[str, torch.Tensor], *, group: Group = None) -> dict[str, torch.Tensor]:
    """What this rank gives to its model, from a batch that is the same on every rank of the group.

    Args:
        batch: "input_ids" (batch, seq) and, if wanted, "labels" (batch, seq), not shifted, -100 where there is no loss.
            "attention_mask" may be there with padding on the right, whose labels are -100; it is checked and left out,
            for a causal mask hides padding by itself. "position_ids" may be there if they are 0 to seq - 1.
        group: the ranks that share the sequence; seq must be a multiple of their number.

    Returns:
        "input_ids" and "position_ids" (batch or 1, seq / P), and with labels: "labels" = "shift_labels", the label of
        the *next* token, across the boundaries between ranks; "num_items_in_batch" (), the labelled tokens of all
        ranks, divided by P. With these a transformers model computes `causal_lm_loss` by itself.

    Raises:
        UnsupportedError: padding elsewhere or with labels, packed documents, an unknown key, or a length that does not
            divide.
    """
    unknown = sorted(set(batch) - set(_KNOWN))
    if unknown or "input_ids" not in batch:
        raise UnsupportedError(
            f"a batch of {', '.join(batch)}", "it is not known how to cut it", "input_ids and labels; others by hand"
        )
    tokens = batch["input_ids"]
    _check_plain(batch, tokens)
    size = group_size(group_name(group))
    local = {
        "input_ids": shard_sequence(tokens, group=group),
        "position_ids": local_positions(tokens.shape[1], group=group, device=tokens.device)[None],
    }
    if "labels" in batch:
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        local["labels"] = local["shift_labels"] = shard_sequence(shifted.contiguous(), group=group)
        local["num_items_in_batch"] = (shifted != IGNORED).sum().clamp(min=1) / size
    return local


def _check_plain(batch: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> None:
    if (mask := batch.get("attention_mask")) is not None:
        check_right(mask)
        if "labels" in batch:
            check_unlabelled(mask, batch["labels"])
    positions = batch.get("position_ids")
    if positions is not None and not bool((positions == torch.arange(tokens.shape[1], device=positions.device)).all()):
        raise UnsupportedError(
            "position_ids that start anew", "packed documents are not planned yet", "one document a sequence"
        )
