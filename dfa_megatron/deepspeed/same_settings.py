"""Compare what the JSONs of all ranks ask for, before any of them makes a group that the others would wait for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dfa_megatron.deepspeed.json_block import KEY, keys_like_ours
from dfa_megatron.errors import UnsupportedError

_COUNTS = (
    *("sequence_parallel_size", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("gradient_accumulation_steps", "gradient_clipping"),
)
"""Keys beside the block by which ranks would form other groups, or take another number of steps."""


def check_same(settings: Mapping[str, Any]) -> None:
    """Refuse blocks, and sizes beside them, that differ between ranks; a collective call of all ranks.

    A rank without the block must call it too. Without a process group of several ranks nothing happens.

    Raises:
        UnsupportedError: on all ranks; it names the first two that differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    asked = {key: settings[key] for key in settings if key in _COUNTS or key in keys_like_ours(settings)}
    asked["zero_optimization.stage"] = (settings.get("zero_optimization") or {}).get("stage", 0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, json.loads(json.dumps(asked, sort_keys=True, default=str)))
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None and any(keys_like_ours(each) for each in found):
        difference = _difference(found, other)
        raise UnsupportedError(
            difference,
            "every rank must ask for the same groups and steps, or it would wait for others for ever",
            "one JSON for all ranks",
        )


def _difference(found: list[dict[str, Any]], rank: int) -> str:
    """Return the first key that differs between rank 0 and another one, with both values."""
    first, other = found[0], found[rank]
    key = min((key for key in first | other if first.get(key) != other.get(key)), key=lambda key: (key != KEY, key))
    said = [f"{key}={json.dumps(each[key])}" if key in each else f"no {key}" for each in (first, other)]
    return f"{said[0]} on rank 0, {said[1]} on rank {rank}"
