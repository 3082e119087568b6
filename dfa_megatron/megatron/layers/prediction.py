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
from dfa_megatron.megatron.tokens.packed_documents import document_order, place
from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.runtime.cu_seqlens import Offsets, offsets_of
from dfa_megatron.sharding import positions_of

logger = logging.getLogger("dfa_megatron.megatron")

_MARK = "_dfa_megatron"
_HOMES = ("megatron.core.transformer.multi_token_prediction", "megatron.core.models.gpt.gpt_model")
"""The modules that call Megatron's roll_tensor, by version."""


def shift(x: torch.Tensor, whole: Layout, group: dist.ProcessGroup, ends: Offsets = ()) -> torch.Tensor:
    """Return what the next token holds, 0 after the last of the sequence and of each document; no autograd.

    One all-gather carries the first token of every chunk.

    Args:
        x: (..., local tokens) of any dtype.
        whole: the layout of the sequence, with as many chunks on every rank.
        group: the ranks that share it.
        ends: the global token offsets of the documents' ends, if any.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = whole.of(rank)
    starts = torch.tensor(list(whole.offsets(mine).values()), device=x.device)
    firsts = x.index_select(-1, starts)
    gathered = firsts.new_empty(ranks, *firsts.shape)
    dist.all_gather(list(gathered), firsts, group=group)
    every = torch.nn.functional.pad(gathered.movedim(0, -2).flatten(-2), (0, 1))  # 0 follows the last chunk
    places = [chunk for owner in range(ranks) for chunk in whole.of(owner)]
    place_of = {chunk: place for place, chunk in enumerate(places)}
    following = torch.tensor([place_of.get(chunk + 1, len(places)) for chunk in mine], device=x.device)
    lengths = torch.tensor([len(whole.chunks[chunk]) for chunk in mine], device=x.device)
    shifted = x.roll(-1, -1)
    shifted[..., starts + lengths - 1] = every.index_select(-1, following)
    if ends:
        last = torch.isin(positions_of(whole, rank, x.device) + 1, torch.tensor(ends, device=x.device))
        shifted[..., last] = 0
    return shifted


def _order_of(
    cp_group: dist.ProcessGroup, params: Any, tokens: int
) -> tuple[dist.ProcessGroup, Layout, Offsets] | None:
    """Return ranks, layout and ends for `shift` where Megatron's own shift would be wrong, else None.

    It knows neither rows cut across documents, nor padding that is not in cu_seqlens_q, nor a micro-batch's own group.
    """
    if params is None:
        order = slicing_of(cp_group, packed=False)
        return None if order is None else (cp_group, by_name(order, tokens * cp_group.size(), cp_group.size()), ())
    pack = place(params)
    group = cp_group if pack.group is None else pack.group
    ranks, padded = group.size(), params.cu_seqlens_q_padded
    is_known = pack.group is None and (padded is None or offsets_of(padded) == offsets_of(params.cu_seqlens_q))
    if pack.is_cut_by_documents(group):
        documents = document_order(params, ranks)
        return None if is_known else (group, documents.layout(ranks), documents.ends())
    order = slicing_of(group, packed=True)
    if order is None and is_known:
        return None
    return group, by_name("contiguous" if ranks == 1 else order or "zigzag", tokens * ranks, ranks), pack.offsets


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
        tensor: Any,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Any:
        known = cp_group is not None and tensor is not None
        ours = _order_of(cp_group, packed_seq_params, tensor.shape[-1]) if known else None
        if ours is None:
            return megatrons(tensor, shifts, dims, cp_group, packed_seq_params, **others)
        unknown = {name: value for name, value in others.items() if name != "return_sum"}
        CALLS.check(rolled=None if shifts == -1 and dims in (-1, tensor.dim() - 1) else (shifts, dims))
        CALLS.check(roll_argument=", ".join(unknown))
        if tensor.dim() == 3:  # multimodal position_ids: they are whole, and prediction layers do not read them
            return tensor, tensor.sum()
        group, layout, ends = ours
        rolled = shift(tensor, layout, group, ends)
        return rolled, rolled.sum() if others.get("return_sum", True) else None

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
