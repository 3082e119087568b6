"""Slices a batch over the context-parallel ranks in the layout that the layers expect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.packing import shard_sequence

logger = logging.getLogger("dfa_megatron.megatron")

_DATA_LAYOUT = {"contiguous": "contiguous", "boundary": "zigzag", "zigzag": "zigzag"}
"""How the data of each layout option are sliced."""

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

    Args:
        batch: tokens, labels, loss_mask, position_ids and the like, each (batch, seq, ...); None stays None.
        cp_group: the context-parallel group; a group of one rank gets the batch as it is.
        options: the options the model was built with. Layout contiguous slices in order; boundary and zigzag slice as
            Megatron's get_batch_on_this_cp_rank does.

    Raises:
        UnsupportedError: an attention_mask (attention is causal by construction), packed documents (cu_seqlens), or a
            length that does not divide among the ranks.
    """
    for name in ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
        if batch.get(name) is not None:
            raise UnsupportedError(
                f"{name} in a batch",
                "attention is causal over the whole row",
                f"{name}=None (Megatron's scripts: --no-create-attention-mask-in-dataloader, no packed sequences)",
            )
    layout = _DATA_LAYOUT[options.layout]
    declare_batch_layout(cp_group, layout)
    if dist.get_world_size(cp_group) == 1:
        return dict(batch)
    return {
        name: None if whole is None else shard_sequence(whole, group=cp_group, layout=layout)
        for name, whole in batch.items()
    }


def declare_batch_layout(cp_group: dist.ProcessGroup, layout: str) -> None:
    """Say how this process slices batches over a context-parallel group: "contiguous" or "zigzag".

    `shard_batch` does it. Call it yourself only where your own code slices: a model cannot tell contiguous tokens from
    zigzag ones, so one in layout `contiguous` refuses to run before somebody has said that its tokens are.
    """
    if layout not in ("contiguous", "zigzag"):
        raise UnsupportedError(f"the batch layout {layout!r}", "there is no such layout", "contiguous or zigzag")
    _DECLARED[cp_group] = layout


def check_declared(cp_group: dist.ProcessGroup, layout_option: str) -> None:
    """Refuse to train on tokens in another order than the layers believe; undeclared ones count as Megatron's zigzag.

    Raises:
        UnsupportedError: the batches are sliced for another layout.
    """
    needed, declared = _DATA_LAYOUT[layout_option], _DECLARED.get(cp_group, "zigzag")
    if needed != declared and dist.get_world_size(cp_group) > 1:
        raise UnsupportedError(
            f"layout={layout_option!r} on batches that are sliced {declared}",
            "tokens would not be where attention believes them to be",
            "dfa_megatron.megatron.shard_batch with the model's options"
            + (
                ", declare_batch_layout where your own code slices, or layout='boundary'"
                if needed == "contiguous"
                else ""
            ),
        )
