"""The positions that a model embeds, made of the places of its tokens in their sequence or document.

For most models they are the same. RoBERTa and its family count from the row behind that of the padding token, and leave
that token out. Language models for images count along three axes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.huggingface import document_starts as packed
from dfa_megatron.huggingface.refusals import INPUTS
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import shard_sequence

_SECTIONS = "mrope_section"
"""Where a config, or a rotary module, says how a head is divided among the axes."""


def padding_of(decoder: Any) -> int | None:
    """The row of padding in a table of learned positions, as RoBERTa and its family have one; None without it."""
    table = getattr(getattr(decoder, "embeddings", None), "position_embeddings", None)
    padding: int | None = getattr(table, "padding_idx", None)
    return padding


def after_padding(
    tokens: torch.Tensor, documents: packed.Documents | None, padding: int, group: str = ""
) -> torch.Tensor:
    """The rows of the table of positions for this rank's tokens; collective, with one small message, in a group.

    Args:
        tokens: (batch, local_seq), of this rank: ids, of which `padding` is not counted and has the row of padding.
        documents: of every row, None if each is one.
        padding: the id of that token, and its row. The first token counted has the next one.
        group: name of the group that shares the sequences, "" for whole sequences on this rank.

    Returns:
        int64 (batch, local_seq).
    """
    real = (tokens != padding).to(torch.uint8)
    parts = [real]
    if group:
        channel = resolve(group)
        parts = [torch.empty_like(real) for _ in range(channel.size())]
        dist.all_gather(parts, real, group=channel)
    whole = torch.cat(parts, 1).long()
    counted = whole.cumsum(1)
    if documents is not None:
        at = torch.arange(whole.shape[1], device=tokens.device)
        before = (counted - whole).gather(1, at - packed.positions_of(documents, tokens.device))
        counted = counted - before
    return shard_sequence(counted * whole + padding, group=group)


def places(decoder: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What a call says of its tokens' places: its position_ids, or the first row where there are several axes.

    Raises:
        UnsupportedError: positions along the axes alone, or embeddings, perhaps of images, without these.
    """
    given: torch.Tensor | None = kwargs.get("position_ids")
    if given is None or not _has_axes(decoder):
        return given
    if given.dim() == 3 and given.shape[0] == 4:
        return given[0]
    if given.dim() == 3 or kwargs.get("inputs_embeds") is not None:
        of = "inputs_embeds in " if given.dim() == 2 else ""
        INPUTS.check(axes=f"{tuple(given.shape)} for {of}a {decoder.config.model_type} model")
    return given


def _has_axes(decoder: Any) -> bool:
    rope = getattr(decoder.config, "rope_parameters", None) or getattr(decoder.config, "rope_scaling", None) or {}
    return bool(rope.get(_SECTIONS) or getattr(getattr(decoder, "rotary_emb", None), _SECTIONS, None))
