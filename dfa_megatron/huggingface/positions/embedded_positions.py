"""Compute the positions that a model embeds from the places of its tokens in their sequence or document.

In most models position and place are equal. RoBERTa and its family do not count padding tokens, and their first
position follows the row of the padding token. Language models for images count along three axes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.positions import document_starts as packed
from dfa_megatron.sharding import shard_sequence, unshard_sequence

_SECTIONS = "mrope_section"
"""The field of a config, or of a rotary module, that divides a head among the axes."""


def padding_of(decoder: Any) -> int | None:
    """Return the padding row of a table of learned positions, as in RoBERTa's family; None if there is none."""
    table = getattr(getattr(decoder, "embeddings", None), "position_embeddings", None)
    padding: int | None = getattr(table, "padding_idx", None)
    return padding


def after_padding(
    tokens: torch.Tensor, documents: packed.Documents | None, padding: int, group: str = ""
) -> torch.Tensor:
    """Return the rows of the table of positions for this rank's tokens; in a group collective, with a small message.

    Args:
        tokens: (batch, local_seq), this rank's token ids.
        documents: the documents of every row, None if each row is one.
        padding: the id of the padding token, and its row in the table. The first other token has the next row.
        group: name of the group that shares the sequences, "" for whole sequences on this rank.

    Returns:
        int64 (batch, local_seq).
    """
    real = (tokens != padding).to(torch.uint8)
    whole = unshard_sequence(real, group=group).long()
    counted = whole.cumsum(1)
    if documents is not None:
        at = torch.arange(whole.shape[1], device=tokens.device)
        before = (counted - whole).gather(1, at - packed.positions_of(documents, tokens.device))
        counted = counted - before
    return shard_sequence(counted * whole + padding, group=group)


def places(decoder: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the places of a call's tokens: its position_ids, or their first row if there are several axes.

    Raises:
        UnsupportedError: position_ids without places, or embeddings, which may be of images, without axes.
    """
    given: torch.Tensor | None = kwargs.get("position_ids")
    if given is None or not has_axes(decoder):
        return given
    if given.dim() == 3 and given.shape[0] == 4:
        return given[0]
    if given.dim() == 3 or kwargs.get("inputs_embeds") is not None:
        refuse_axes(decoder, given, embedded=given.dim() == 2)
    return given


def refuse_axes(decoder: Any, given: torch.Tensor, *, embedded: bool) -> NoReturn:
    """Refuse position_ids without places or axes.

    Raises:
        UnsupportedError: always.
    """
    shape, of, kind = tuple(given.shape), "inputs_embeds in " if embedded else "", decoder.config.model_type
    raise UnsupportedError(
        f"position_ids of shape {shape} for {of}a {kind} model",
        "the tokens of images have positions along several axes, and beside them a token's place in the sequence must "
        "be known",
        "position_ids (4, batch, seq): the places, as shard_batch cuts them, and the axes, cut alike; or input_ids of "
        "text",
    )


def has_axes(decoder: Any) -> bool:
    """Return whether a language model embeds positions along several axes."""
    rope = getattr(decoder.config, "rope_parameters", None) or getattr(decoder.config, "rope_scaling", None) or {}
    return bool(rope.get(_SECTIONS) or getattr(getattr(decoder, "rotary_emb", None), _SECTIONS, None))
