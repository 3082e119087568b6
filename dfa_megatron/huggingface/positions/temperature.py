"""Correct the scale of queries that grows with a token's place (Llama 4's layers without RoPE).

Such a layer counts places from 0 in the tokens that it is given, which are this rank's part. Its queries arrive scaled
by these places; here they get the scale of their places in the whole document.
"""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.huggingface.positions import document_starts as packed
from dfa_megatron.runtime.comm.groups import group_size
from dfa_megatron.sharding import local_positions, shard_sequence


def tempered(module: Any, query: torch.Tensor, documents: packed.Documents | None, group: str = "") -> torch.Tensor:
    """Return the queries (batch, heads, local_seq, head_dim) with the scale of their places.

    Args:
        module: the attention layer; one that has no temperature gets its queries back as they are.
        documents: of every row, None if each row is one.
        group: name of the group that shares the sequences, "" for whole sequences on this rank.
    """
    if not has_temperature(module):
        return query
    local = query.shape[2]
    if documents is None:
        whole = local_positions(local * group_size(group), group=group, device=query.device)[None]
    else:
        whole = shard_sequence(packed.positions_of(documents, query.device), group=group)
    taken = torch.arange(local, device=query.device)[None]
    ratio = _scale(module, whole) / _scale(module, taken)
    return (query * ratio[:, None, :, None]).to(query.dtype)


def has_temperature(module: Any) -> bool:
    """Return whether a layer scales its queries by their places."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _scale(module: Any, places: torch.Tensor) -> torch.Tensor:
    """Return the scale as the fields of Llama 4's configuration define it."""
    scale: torch.Tensor = torch.log1p(((places + 1.0) / module.floor_scale).floor()) * module.attn_scale + 1.0
    return scale
