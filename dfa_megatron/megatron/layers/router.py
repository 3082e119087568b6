"""Sum the losses of a layer's router over the ranks that share a micro-batch, where it names its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.megatron.tokens.packed_documents import PlacedPack


@functools.cache
def router_class(base: Any) -> Any:
    """Return the subclass of Megatron's router whose losses are of the ranks that share the micro-batch.

    Megatron's aux_loss, seq_aux_loss and z-loss count the tokens of `tp_cp_group`.
    """

    class GroupedRouter(base):  # type: ignore[misc]
        dfa_pack: PlacedPack | None = None
        """The documents of the micro-batch; the layer sets it before every forward."""

        @property
        def tp_cp_group(self) -> Any:
            """Return the ranks that share the micro-batch."""
            own = None if self.dfa_pack is None else self.dfa_pack.group
            return self.__dict__["tp_cp_group"] if own is None else own

        def attach_and_log_load_balancing_loss(
            self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, name: str, group: Any, **others: Any
        ) -> torch.Tensor:
            """Attach a loss like TopKRouter; the log gets its mean over the ranks.

            Megatron sums logged losses once a step over one group, so that must be the model's.
            """
            models = self.__dict__["tp_cp_group"]
            if group is not models and group is self.tp_cp_group:
                logged = loss.detach().clone()
                dist.all_reduce(logged, group=group)
                loss = loss + (logged / models.size() - loss.detach())
                group = models
            attach = super().attach_and_log_load_balancing_loss
            attached: torch.Tensor = attach(activation, coefficient, loss, name, group, **others)
            return attached

    return GroupedRouter


def grouped_router(layer: Any) -> list[Any]:
    """Make the losses of a layer's router follow the `dfa_pack` that it is given; return it, if there is one."""
    from megatron.core.transformer.moe.router import TopKRouter

    router: Any = getattr(getattr(layer, "mlp", None), "router", None)
    if not isinstance(router, TopKRouter):
        return []
    if not hasattr(router, "dfa_pack"):
        base: Any = type(router)
        router.__class__ = router_class(base)
    return [router]
