"""Compute the losses of a layer's router over all tokens of the ranks that share a micro-batch.

Megatron sums them over a model's group, and weighs them by the tokens of one rank: with a padding mask, or a group of
the micro-batch's own, those are the wrong numbers.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.megatron.tokens.packed_documents import PlacedPack

_MARK = "_dfa_megatron"


class _Running(threading.local):
    router: Any = None
    per_token = False


_RUNNING = _Running()
"""The router of `router_class` that this thread runs, and whether gradients are divided by all tokens of the batch."""


@functools.cache
def router_class(base: Any) -> Any:
    """Return the subclass of Megatron's router whose losses are of all tokens of the micro-batch.

    They are aux_loss, seq_aux_loss, global_aux_loss and the z-loss.
    """

    class GroupedRouter(base):  # type: ignore[misc]
        calculate_per_token_loss: bool
        dfa_pack: PlacedPack | None = None
        """The documents of the micro-batch; the layer sets it before every forward."""

        @property
        def tp_cp_group(self) -> Any:
            """Return the ranks that share the micro-batch."""
            own = None if self.dfa_pack is None else self.dfa_pack.group
            return self.__dict__["tp_cp_group"] if own is None else own

        @tp_cp_group.setter
        def tp_cp_group(self, group: Any) -> None:
            self.__dict__["tp_cp_group"] = group  # the layer refuses to run on another

        def routing(self, *args: Any, **kwargs: Any) -> Any:
            """Choose experts like TopKRouter, and attach the losses of all ranks."""
            # Releases of Megatron weigh a loss per token in different ways; here its gradient is weighted already.
            per_token, self.calculate_per_token_loss = self.calculate_per_token_loss, False
            _RUNNING.router, _RUNNING.per_token = self, per_token
            try:
                return super().routing(*args, **kwargs)
            finally:
                _RUNNING.router, _RUNNING.per_token = None, False
                self.calculate_per_token_loss = per_token

        def attach_and_log_load_balancing_loss(
            self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, name: str, group: Any, **others: Any
        ) -> torch.Tensor:
            """Attach a loss like TopKRouter; the log gets its mean over the ranks.

            Megatron sums logged losses once a step over one group, so that must be the model's.
            """
            models, value = self.__dict__["tp_cp_group"], loss.detach()
            if group is not models and group is self.tp_cp_group:
                logged = value.clone()
                dist.all_reduce(logged, group=group)
                group, value = models, logged / models.size()
            loss = value + _gradient(loss, others.get("valid_token_count"), self.tp_cp_group)
            attach = super().attach_and_log_load_balancing_loss
            attached: torch.Tensor = attach(activation, coefficient, loss, name, group, **others)
            return attached

    return GroupedRouter


def _every(tokens: Any, group: Any) -> Any:
    """Return the tokens of all ranks that count, at least 1; without padding every rank has as many."""
    if not isinstance(tokens, torch.Tensor):
        return tokens * group.size()
    every = tokens.detach().float().clone()
    dist.all_reduce(every, group=group)
    return every.clamp(min=1)


def _gradient(loss: torch.Tensor, tokens: Any, group: Any) -> torch.Tensor:
    """Return 0 with the gradient that a loss shall have, given the tokens of this rank that count.

    With calculate_per_token_loss Megatron divides all gradients by the tokens of the batch, so that of a mean is
    multiplied by the tokens of the micro-batch.
    """
    change = loss - loss.detach()
    return change * _every(tokens, group) if _RUNNING.per_token else change


def grouped_router(layer: Any) -> list[Any]:
    """Make the losses of a layer's router those of all ranks, which `dfa_pack` may name; return it, if there is one."""
    from megatron.core.transformer.moe.router import TopKRouter

    router: Any = getattr(getattr(layer, "mlp", None), "router", None)
    if not isinstance(router, TopKRouter):
        return []
    if not hasattr(router, "dfa_pack"):
        base: Any = type(router)
        router.__class__ = router_class(base)
        _replace("z_loss_func", _mean_over_ranks)
        _replace("get_tokens_per_expert_and_token_count", _counting_first)
    return [router]


def _replace(name: str, replacing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function that Megatron's routers call; what replaces it acts in routers of `router_class` alone."""
    home = vars(importlib.import_module("megatron.core.transformer.moe.router"))
    if not hasattr(home[name], _MARK):
        ours = functools.wraps(home[name])(replacing(home[name]))
        setattr(ours, _MARK, home[name])
        home[name] = ours


def _mean_over_ranks(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """The z-loss, which Megatron divides by the tokens of one rank; their mean count makes it that of all ranks."""

    def z_loss_func(logits: torch.Tensor, *args: Any, padding_mask: Any = None, **others: Any) -> Any:
        loss = megatrons(logits, *args, padding_mask=padding_mask, **others)
        if _RUNNING.router is None:
            return loss
        group = _RUNNING.router.tp_cp_group
        tokens = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        loss = loss * (tokens * group.size() / _every(tokens, group))
        return loss.detach() + _gradient(loss, tokens, group)

    return z_loss_func


def _counting_first(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """The counts of tokens; with a padding mask Megatron sums over the ranks in place before it counts its own."""

    def get_tokens_per_expert_and_token_count(routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = routing_map.sum()
        per_expert, local, every = megatrons(routing_map, *args, **kwargs)
        if _RUNNING.router is not None and isinstance(local, torch.Tensor):
            local = own / kwargs["topk"]
        return per_expert, local, every

    return get_tokens_per_expert_and_token_count
