"""Weigh the losses of a layer's router by all tokens of the ranks that share a micro-batch.

Megatron sums them over these ranks, but weighs them by the tokens of one: with a padding mask, or where gradients are
divided by all tokens, that is the wrong number.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.hooks import for_a_while
from dfa_megatron.megatron.replace import replace


class _RunningRouter(threading.local):
    router: Any = None
    per_token = False


_ROUTER = _RunningRouter()
"""The router that this thread runs, and whether gradients are divided by all tokens of the batch."""


@functools.cache
def _router_class(base: Any) -> Any:
    """Return the subclass of Megatron's router whose losses are weighed by all tokens of the micro-batch."""

    class WeighingRouter(base):  # type: ignore[misc]
        tp_cp_group: Any
        dfa_weighs = True
        calculate_per_token_loss: bool

        def routing(self, *args: Any, **kwargs: Any) -> Any:
            """Choose experts like TopKRouter, and attach the losses of all ranks."""
            # Releases of Megatron weigh a loss per token in different ways; here its gradient is weighted already.
            running = for_a_while(_ROUTER, router=self, per_token=self.calculate_per_token_loss)
            with running, for_a_while(self, calculate_per_token_loss=False):
                return super().routing(*args, **kwargs)

        def attach_and_log_load_balancing_loss(
            self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, name: str, group: Any, **others: Any
        ) -> torch.Tensor:
            """Attach a loss like TopKRouter."""
            loss = loss.detach() + _gradient(loss, others.get("valid_token_count"), self.tp_cp_group)
            attach = super().attach_and_log_load_balancing_loss
            attached: torch.Tensor = attach(activation, coefficient, loss, name, group, **others)
            return attached

    return WeighingRouter


def _every(tokens: Any, group: Any) -> Any:
    """Return the tokens of all ranks that count, 1 for 0; under 1 where Megatron counts per sequence of a batch."""
    if not isinstance(tokens, torch.Tensor):
        return tokens * group.size()
    every = tokens.detach().float().clone()
    dist.all_reduce(every, group=group)
    return torch.where(every == 0, 1.0, every)


def _gradient(loss: torch.Tensor, tokens: Any, group: Any) -> torch.Tensor:
    """Return 0 with the gradient that a loss shall have, given the tokens of this rank that count.

    With calculate_per_token_loss Megatron divides all gradients by the tokens of the batch, so that of a mean is
    multiplied by the tokens of the micro-batch.
    """
    change = loss - loss.detach()
    return change * _every(tokens, group) if _ROUTER.per_token else change


def weigh_losses(layer: Any) -> None:
    """Weigh the losses of a layer's router, if it has one, by the tokens of all ranks; once."""
    from megatron.core.transformer.moe import router as home

    router: Any = getattr(getattr(layer, "mlp", None), "router", None)
    if not isinstance(router, home.TopKRouter) or hasattr(router, "dfa_weighs"):
        return
    base: Any = type(router)
    router.__class__ = _router_class(base)
    replace(home, "z_loss_func", _mean_over_ranks)
    replace(home, "get_tokens_per_expert_and_token_count", _counting_first)


def _mean_over_ranks(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """The z-loss, which Megatron divides by the tokens of one rank; their mean count makes it that of all ranks."""

    def z_loss_func(logits: torch.Tensor, *args: Any, padding_mask: Any = None, **others: Any) -> Any:
        loss = megatrons(logits, *args, padding_mask=padding_mask, **others)
        if _ROUTER.router is None:
            return loss
        group = _ROUTER.router.tp_cp_group
        tokens = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        loss = loss * (tokens * group.size() / _every(tokens, group))
        return loss.detach() + _gradient(loss, tokens, group)

    return z_loss_func


def _counting_first(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """The counts of tokens; with a padding mask Megatron sums over the ranks in place before it counts its own."""

    def get_tokens_per_expert_and_token_count(routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = routing_map.sum()
        per_expert, local, every = megatrons(routing_map, *args, **kwargs)
        if _ROUTER.router is not None and isinstance(local, torch.Tensor):
            local = own / kwargs["topk"]
        return per_expert, local, every

    return get_tokens_per_expert_and_token_count


def has_losses(config: Any) -> bool:
    """Return whether routers add losses, or balance the experts by sinkhorn."""
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    weighs = any(weights) if isinstance(weights, (list, tuple)) else bool(weights)
    return bool(config.num_moe_experts) and (bool(config.moe_z_loss_coeff) or weighs or "sinkhorn" in kinds)
