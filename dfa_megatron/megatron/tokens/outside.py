"""Exchange routing and extracted hidden states between the caller's order of tokens and the layers' order.

In layout `boundary` the caller uses Megatron's zigzag order and the layers use contiguous order. This module exchanges
the experts' recorded and replayed routing, and hidden states that a caller extracts between layers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from dfa_megatron.megatron.refusals import CALLS

_MARK = "_dfa_gives_back_in_order"


class ExchangedReplay:
    """Exchange routing indices, (tokens, topk) int64; always the first base of `_replay_class`.

    The router's own tokens are contiguous. Recorded and replayed indices are in zigzag order.
    """

    def record_indices(self, topk_indices: torch.Tensor) -> None:
        """Record the router's choice in the caller's order."""
        super().record_indices(self._moved(topk_indices, outward=True))  # type: ignore[misc]

    def get_replay_topk(self, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the replayed choice, like RouterReplay, from indices that are exchanged first.

        Raises:
            UnsupportedError: an unknown action, or indices for another number of tokens than in scores.
        """
        replay: Any = self
        action = getattr(replay.router_replay_action, "name", None)
        choose = super().get_replay_topk  # type: ignore[misc]
        if action in (None, "RECORD"):
            return choose(scores, *args, **kwargs)
        if action == "REPLAY_FORWARD":
            given = replay.target_topk_idx
            replay.target_topk_idx = self._to_replay(given, scores)
            try:
                return choose(scores, *args, **kwargs)
            finally:
                replay.target_topk_idx = given
        if action == "REPLAY_BACKWARD":
            waiting = replay.replay_backward_list
            waiting[0] = self._to_replay(waiting[0], scores)  # the next one in the list
            return choose(scores, *args, **kwargs)
        CALLS.check(routing_action=action)

    def _to_replay(self, given: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        CALLS.check(replayed_tokens=given.shape[0], router_tokens=scores.shape[0])
        return self._moved(given.to(scores.device), outward=False)

    def _moved(self, indices: torch.Tensor, *, outward: bool) -> torch.Tensor:
        replay: Any = self
        rows = indices.reshape(replay.dfa_rows, -1)  # one position's tokens of all samples travel together
        layer = replay.dfa_layer
        way = ("contiguous", layer._dfa_order) if outward else (layer._dfa_order, "contiguous")
        moved: torch.Tensor = layer._dfa_exchange().move(rows, *way)
        return moved.reshape(indices.shape)


@functools.cache
def _replay_class(base: type) -> type:
    return type(f"Exchanged{base.__name__}", (ExchangedReplay, base), {"__module__": __name__})


def exchange_routing(layer: Any) -> None:
    """Make a layer's router record and replay in the caller's order, if it has experts and records their routing.

    Every pass reads the number of samples from the router's input, because (tokens, topk) does not show it.
    """
    router: Any = getattr(getattr(layer, "mlp", None), "router", None)
    replay: Any = getattr(router, "router_replay", None)
    if replay is None:
        return
    base: Any = type(replay)
    replay.__class__ = _replay_class(base)
    replay.dfa_layer = layer

    def look(router: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["input"]
        router.router_replay.dfa_rows = hidden_states.shape[0]

    router.register_forward_pre_hook(look, with_kwargs=True)


def exchange_extracted() -> None:
    """Make the TransformerBlock under construction return `extract_layer_indices` in the caller's order.

    Megatron gives a layer no reference to its block, so this function searches the call stack for the block. A layer
    that is built alone has none.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), TransformerBlock):
        frame = frame.f_back  # type: ignore[assignment]
    block = None if frame is None else frame.f_locals["self"]
    if block is None or hasattr(block, _MARK):
        return
    if "extract_layer_indices" in inspect.signature(type(block).forward).parameters:  # Megatron-Core 0.19 and later
        setattr(block, _MARK, True)
        block.register_forward_hook(_in_order, with_kwargs=True)


def _in_order(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    asked = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
    wanted = asked.get("extract_layer_indices")
    if not wanted:
        return None
    hidden_states, between = output
    layers = [layer for layer in block.layers if layer.layer_number - 1 in wanted]
    CALLS.check(extracted=(sorted(wanted), len(between), len(layers)))
    moved = [
        states if layer._dfa_last else layer._dfa_exchange()(states, "contiguous", layer._dfa_order)
        for layer, states in zip(layers, between, strict=True)
    ]
    return hidden_states, moved
