"""Shift tokens and labels for multi-token prediction where Megatron's order does not hold: in order, and in packs."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.megatron.layers.layer import DistributedAttentionLayer
from dfa_megatron.megatron.layers.recompute import taken_over
from dfa_megatron.megatron.refusals import CALLS, LAYERS
from dfa_megatron.megatron.tokens.batch import slicing_of
from dfa_megatron.megatron.tokens.packed_documents import place
from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.runtime.cu_seqlens import Offsets
from dfa_megatron.sharding import positions_of

logger = logging.getLogger("dfa_megatron.megatron")

_MARK = "_dfa_megatron"
_HOMES = ("megatron.core.transformer.multi_token_prediction", "megatron.core.models.gpt.gpt_model")
"""The modules that call Megatron's roll_tensor, by version."""


def shift(x: torch.Tensor, layout: str, group: dist.ProcessGroup, documents: Offsets = ()) -> torch.Tensor:
    """Return what the next token holds, 0 after the last of the sequence and of each document; no autograd.

    One all-gather carries the first token of every chunk.

    Args:
        x: (..., local tokens) of any dtype.
        layout: "contiguous" or "zigzag".
        group: the ranks that share the sequence.
        documents: their global token offsets, if any.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = by_name(layout, x.shape[-1] * ranks, ranks)
    starts = whole.offsets(whole.of(rank))
    firsts = torch.stack([x[..., start] for start in starts.values()])
    gathered = firsts.new_empty(ranks, *firsts.shape)
    dist.all_gather(list(gathered), firsts, group=group)
    owned = {chunk: (owner, place) for owner in range(ranks) for place, chunk in enumerate(whole.of(owner))}
    parts = []
    for chunk, start in starts.items():
        following = gathered[owned[chunk + 1]] if chunk + 1 in owned else torch.zeros_like(x[..., 0])
        parts += [x[..., start + 1 : start + len(whole.chunks[chunk])], following[..., None]]
    shifted = torch.cat(parts, dim=-1)
    if documents:
        shifted[..., _at_ends(whole, rank, documents, x.device)] = 0
    return shifted


def _at_ends(whole: Layout, rank: int, documents: Offsets, device: torch.device) -> torch.Tensor:
    """Return which local tokens are the last of a document."""
    ends = torch.tensor(documents[1:], device=device)
    return torch.isin(positions_of(whole, rank, device) + 1, ends)


def follow_batches() -> None:
    """Make Megatron's roll_tensor and its prediction layers follow batches that this package sliced.

    Batches in Megatron's own order stay its own matter. A second call changes nothing.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    for home in _HOMES:
        module = importlib.import_module(home)
        megatrons = getattr(module, "roll_tensor", None)
        if megatrons is not None and not hasattr(megatrons, _MARK):
            vars(module)["roll_tensor"] = _rolling(megatrons)
    megatrons = MultiTokenPredictionLayer.forward
    if not hasattr(megatrons, _MARK):
        MultiTokenPredictionLayer.forward = _checking(megatrons)


def _rolling(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(megatrons)
    def roll_tensor(
        tensor: Any, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> Any:
        order = None if cp_group is None else slicing_of(cp_group, packed=packed_seq_params is not None)
        if order is None or tensor is None:
            return megatrons(tensor, shifts, dims, cp_group, packed_seq_params)
        CALLS.check(rolled=None if shifts == -1 and dims in (-1, tensor.dim() - 1) else (shifts, dims))
        if tensor.dim() == 3:  # multimodal position_ids: they are whole, and prediction layers do not read them
            return tensor, tensor.sum()
        documents = () if packed_seq_params is None else place(packed_seq_params).offsets
        rolled = shift(tensor, order, cp_group, documents)
        return rolled, rolled.sum()

    setattr(roll_tensor, _MARK, megatrons)
    return roll_tensor


def _checking(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(megatrons)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        other = _has_other_attention(self)
        order = slicing_of(self.cp_group, packed=kwargs.get("packed_seq_params") is not None)
        LAYERS.check(other_layer=other and order is not None, context_parallel_size=self.config.context_parallel_size)
        if other and taken_over(self.config):
            _say_kept()
        return megatrons(self, *args, **kwargs)

    setattr(forward, _MARK, megatrons)
    return forward


def _has_other_attention(prediction: torch.nn.Module) -> bool:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return any(
        isinstance(layer, TransformerLayer)
        and isinstance(layer.self_attention, Attention)
        and not isinstance(layer, DistributedAttentionLayer)
        for layer in prediction.modules()
    )


@functools.cache
def _say_kept() -> None:
    logger.warning(
        "dfa: multi-token prediction layers with Megatron's own attention are not recomputed, because full "
        "recomputation has been taken over"
    )
