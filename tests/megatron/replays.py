"""Experts that Megatron's RouterReplay replays or records, as a trainer hands them to its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.frameworks.compare import Found

_RECORDING: dict[str, tuple[torch.Tensor, Any]] = {}
"""Of each router the tokens of its call, and its replay, which is read after the backward."""


def _experts(at: torch.Tensor, router: Any) -> torch.Tensor:
    """Return experts (tokens, topk) that no router would choose, by the numbers of tokens and of the layer."""
    first = at * 5 + at // 7 + router.layer_number * 3
    return (first[:, None] + torch.arange(router.topk)) % router.config.num_moe_experts


@contextmanager
def replayed(routing: str, at: torch.Tensor, model: Any) -> Iterator[None]:
    """Have a call of a model "replay" or "record", or neither; `at` numbers its tokens, (batch, tokens)."""
    if not routing:
        yield
        return
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    rows = at.T
    if model.config.sequence_parallel:
        rows = rows.chunk(model.pg_collection.tp.size())[model.pg_collection.tp.rank()]
    routers = [module for module in model.modules() if getattr(module, "router_replay", None) is not None]
    assert routers
    for router in routers:
        router.router_replay.clear_indices()
        action = RouterReplayAction.RECORD if routing == "record" else RouterReplayAction.REPLAY_FORWARD
        router.router_replay.set_router_replay_action(action)
        if routing == "replay":
            router.router_replay.set_target_indices(_experts(rows.flatten(), router))
    yield
    for router in routers:
        if routing == "record":
            name = f"experts of layer {router.layer_number}"
            assert name not in _RECORDING, "more than one micro-batch"
            _RECORDING[name] = rows, router.router_replay
        else:  # for what is recomputed in the backward
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def tell(found: Found) -> None:
    """Put what a micro-batch recorded beside what is compared."""
    for name, (rows, replay) in _RECORDING.items():
        order = (at := rows.flatten()).argsort()
        found.outputs[name] = replay.get_recorded_indices()[order]
        found.places[name] = {0: at[order]}
    _RECORDING.clear()
