"""Bring the experts that Megatron's RouterReplay replays into the order of the layers, and those that it records back.

They are given and read as on Megatron's own ranks: of each router (tokens [/ TP under sequence parallelism] * batch,
topk), in the caller's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.replace import with_ours
from dfa_megatron.megatron.tokens.visit import Visit

_INSIDE = "dfa_inside"
"""The attribute of a tensor of experts that is in the order of the layers."""


class RecordOnce:
    """Record what the first pass chooses; a recompute would put the order of the layers in its place."""

    def record_indices(self, chosen: torch.Tensor) -> None:
        """Record as Megatron's does."""
        if torch._C._current_graph_task_id() == -1:
            super().record_indices(chosen)  # type: ignore[misc]


@contextmanager
def replaying(visit: Visit, replays: list[Any]) -> Iterator[None]:
    """Bring experts in before a call of a language model, and back after it: one all-to-all each way for all layers."""
    active = [replay for replay in replays if replay.router_replay_action is not None]
    _bring_in(visit, active)
    yield
    recording = [x for x in active if x.router_replay_action.name == "RECORD" and x.recorded_topk_idx is not None]
    back = _move(visit, [replay.recorded_topk_idx for replay in recording], back=True)
    for replay, recorded in zip(recording, back, strict=True):
        replay.recorded_topk_idx = recorded


def replays_of(model: Any) -> list[Any]:
    """Return the replays of a model's routers, each of a class that records once."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    found: list[Any] = [x for module in model.modules() if (x := getattr(module, "router_replay", None)) is not None]
    for replay in found:
        if not isinstance(replay, RouterReplay):
            raise UnsupportedError(
                f"a router_replay of {type(replay).__module__} in data_layout='boundary'",
                "what it replays would stay in the caller's order",
                "Megatron's own, with --moe-enable-routing-replay; or data_layout='contiguous' or 'zigzag'",
            )
        base: Any = type(replay)
        replay.__class__ = with_ours(RecordOnce, base)
    return found


def _bring_in(visit: Visit, replays: list[Any]) -> None:
    """Put experts in the order of the layers where replays have those of the caller; a list is for recomputes."""
    held = [x for replay in replays for x in (replay.target_topk_idx, *replay.replay_backward_list)]
    given = list({id(x): x for x in held if x is not None and not hasattr(x, _INSIDE)}.values())
    inside = _move(visit, given, back=False)
    for x in inside:
        setattr(x, _INSIDE, True)
    moved = {id(x): y for x, y in zip(given, inside, strict=True)}
    for replay in replays:
        replay.target_topk_idx = moved.get(id(replay.target_topk_idx), replay.target_topk_idx)
        replay.replay_backward_list = [moved.get(id(x), x) for x in replay.replay_backward_list]


def _move(visit: Visit, experts: list[torch.Tensor], *, back: bool) -> list[torch.Tensor]:
    """Return experts of several routers in the other order."""
    config, (batch, tokens) = visit.model.config, visit.rows
    rows = batch * tokens // (visit.model.pg_collection.tp.size() if config.sequence_parallel else 1)
    if other := [len(x) for x in experts if len(x) != rows]:
        raise UnsupportedError(
            f"experts to replay for {other[0]} tokens, where this rank has {rows}",
            "each rank replays those of its own tokens",
            "experts cut as the batch is cut, (tokens * batch, topk) of each router",
        )
    if not experts:
        return []
    every = torch.cat([x.long() for x in experts], 1)
    moved = visit.hidden(every.unflatten(0, (-1, batch)), back=back).flatten(0, 1)
    return [part.to(x.dtype) for x, part in zip(experts, moved.split([x.shape[1] for x in experts], 1), strict=True)]
