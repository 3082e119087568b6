"""Slices a batch over the context-parallel ranks in the layout that the layers expect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.start.flags import packs_of_args
from dfa_megatron.sharding import shard_sequence

logger = logging.getLogger("dfa_megatron.megatron")

_DATA_LAYOUT = {"contiguous": "contiguous", "boundary": "zigzag", "zigzag": "zigzag"}
"""How the data of each layout option are sliced."""

_WHOLE = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
"""What a batch says of whole documents, and is not sliced."""

_DECLARED: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""How the batches of a context-parallel group are sliced. It is the one thing a model cannot see in its input."""


def shard_batch(
    batch: Mapping[str, torch.Tensor | None],
    cp_group: dist.ProcessGroup,
    options: DistAttentionConfig,
) -> dict[str, torch.Tensor | None]:
    """This rank's part of a batch that every rank of the group holds whole. Use it in place of Megatron's slicing:

        batch = shard_batch(batch, parallel_state.get_context_parallel_group(), options)
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    Packed documents are told by cu_seqlens. They may have any length and reach over ranks, and nothing need be padded
    but the row, to a multiple of CP tokens. Several rows become one, as Megatron's flatten_batch_for_packed_sequences
    has it; `packed_seq_params` then makes what the model takes.

    Args:
        batch: tokens, labels, loss_mask, position_ids and the like, each (batch, seq, ...); None stays None.
            position_ids may be (3, batch, seq), of multimodal rotary embeddings: they stay whole, because Megatron's
            module makes the table of all tokens and slices that. cu_seqlens and cu_seqlens_padded are int32 offsets
            into a row, (documents + 1) for a single one or (batch, documents + 1), where the last may be repeated; they
            and max_seqlen stay whole.
        cp_group: the context-parallel group; a group of one rank gets the batch as it is.
        options: the options the model was built with. Layout contiguous slices in order; boundary and zigzag slice as
            Megatron's get_batch_on_this_cp_rank does.

    Raises:
        UnsupportedError: an attention_mask (attention is causal by construction), cu_seqlens of other rows,
            multimodal position_ids with either of cu_seqlens and another layout than zigzag, or a length that does not
            divide among the ranks.
    """
    if batch.get("attention_mask") is not None:
        raise UnsupportedError(
            "attention_mask in a batch",
            "attention is causal over the whole row, or over each document of cu_seqlens",
            "attention_mask=None (Megatron's scripts: --no-create-attention-mask-in-dataloader)",
        )
    layout = _DATA_LAYOUT[options.data_layout]
    ranks = dist.get_world_size(cp_group)
    stay = (*_WHOLE, "position_ids") if _multimodal(batch, options, ranks) else _WHOLE
    declare_batch_layout(cp_group, layout)
    batch = _one_row(batch)
    if ranks == 1:
        return dict(batch)
    return {
        name: whole if whole is None or name in stay else shard_sequence(whole, group=cp_group, layout=layout)
        for name, whole in batch.items()
    }


def _multimodal(batch: Mapping[str, torch.Tensor | None], options: DistAttentionConfig, ranks: int) -> bool:
    """Whether position_ids are (3, batch, seq), a time, a height and a width of every token."""
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 3:
        return False
    if batch.get("cu_seqlens") is not None:
        raise UnsupportedError(
            f"position_ids of shape {tuple(positions.shape)} with packed documents",
            "the table of multimodal rotary embeddings follows them, not documents",
            "one document per row",
        )
    if options.data_layout != "zigzag" and ranks > 1:
        raise UnsupportedError(
            f"position_ids of shape {tuple(positions.shape)} in data_layout={options.data_layout!r}",
            "Megatron slices the table of multimodal rotary embeddings in zigzag order",
            "data_layout='zigzag'",
        )
    return True


def _one_row(batch: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor | None]:
    """Packed documents of several rows as documents of a single one."""
    rows = next((x for name, x in batch.items() if x is not None and name not in _WHOLE), None)
    if batch.get("cu_seqlens") is None or rows is None or rows.shape[0] == 1:
        return batch
    one = {name: x if x is None or name in _WHOLE else x.flatten(0, 1)[None] for name, x in batch.items()}
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if (offsets := batch.get(name)) is not None:
            if offsets.dim() != 2 or offsets.shape[0] != rows.shape[0]:
                raise UnsupportedError(
                    f"{name} of shape {tuple(offsets.shape)} with {rows.shape[0]} rows",
                    "it holds offsets into each row",
                    f"({rows.shape[0]}, documents + 1)",
                )
            starts = torch.arange(rows.shape[0], device=offsets.device, dtype=offsets.dtype) * rows.shape[1]
            one[name] = torch.unique_consecutive(offsets + starts[:, None])[None]
    if (longest := batch.get("max_seqlen")) is not None:
        one["max_seqlen"] = longest.max()[None]
    return one


def declare_batch_layout(cp_group: dist.ProcessGroup, layout: str) -> None:
    """Say how this process slices batches over a context-parallel group: "contiguous" or "zigzag".

    `shard_batch` does it. Call it yourself only where your own code slices: a model cannot tell contiguous tokens from
    zigzag ones, so one in layout `contiguous` refuses to run before somebody has said that its tokens are.
    """
    if layout not in ("contiguous", "zigzag"):
        raise UnsupportedError(f"the batch layout {layout!r}", "there is no such layout", "contiguous or zigzag")
    _DECLARED[cp_group] = layout


def check_declared(cp_group: dist.ProcessGroup, layout_option: str, *, packed: bool = False) -> None:
    """Refuse to train on tokens in another order than the layers believe; undeclared ones count as Megatron's zigzag.

    Undeclared packed ones count as zigzag in every document, unless the script's flags say that it is in every row.

    Raises:
        UnsupportedError: the batches are sliced for another layout.
    """
    needed, declared = _DATA_LAYOUT[layout_option], _DECLARED.get(cp_group, "zigzag")
    if needed != declared and dist.get_world_size(cp_group) > 1:
        raise UnsupportedError(
            f"data_layout={layout_option!r} on batches that are sliced {declared}",
            "tokens would not be where attention believes them to be",
            "dfa_megatron.megatron.shard_batch with the model's options"
            + (
                ", declare_batch_layout where your own code slices, or data_layout='boundary'"
                if needed == "contiguous"
                else ""
            ),
        )
    if packed and cp_group not in _DECLARED and dist.get_world_size(cp_group) > 1 and packs_of_args() != "rows":
        raise UnsupportedError(
            f"packed documents in data_layout={layout_option!r} that nobody is known to have sliced by rows",
            "Megatron slices them one by one, each in zigzag order, with TransformerEngine's help",
            "dfa_megatron.megatron.shard_batch with the model's options, or declare_batch_layout(cp_group, 'zigzag') "
            "where your own code slices whole rows",
        )
