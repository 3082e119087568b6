"""Faults that a rank process is given before it builds the model; each breaks one thing as a real mistake would."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist


def _calls_with(**changed: Any) -> None:
    """Every distributed attention is called with other arguments."""
    from dfa_megatron import attention

    real = attention.dist_flash_attn_func

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, **changed})

    vars(attention)["dist_flash_attn_func"] = wrong


def context_parallelism_is_not_active() -> None:
    """Each rank attends to its own tokens alone."""
    from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention

    real = DistributedCoreAttention.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.cp_group = kwargs["pg_collection"].tp

    vars_of(DistributedCoreAttention, "__init__", wrong)


def vars_of(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def the_mask_is_dropped() -> None:
    _calls_with(causal=False, window_size=(-1, -1))


def the_window_is_dropped() -> None:
    _calls_with(window_size=(-1, -1))


def rope_has_no_offset() -> None:
    """Every rank takes the rotary table of the first tokens."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def wrong(table: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        return table.chunk(dist.get_world_size(cp_group), seq_dim)[0]

    vars(rotary_pos_embedding)["get_pos_emb_on_this_cp_rank"] = wrong


def labels_are_shifted_inside_chunks() -> None:
    """As a loader does that makes labels of tokens it has sliced already."""
    import megatron.core.utils

    real = megatron.core.utils.get_batch_on_this_cp_rank

    @functools.wraps(real)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        return {**batch, "labels": batch["tokens"].roll(-1, 1)}

    vars(megatron.core.utils)["get_batch_on_this_cp_rank"] = wrong


def the_loss_is_scaled_by_the_ranks() -> None:
    from megatron.core.pipeline_parallel import schedules

    real = schedules.forward_step_calc_loss

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, *others = real(*args, **kwargs)
        return output * dist.get_world_size(), *others

    vars(schedules)["forward_step_calc_loss"] = wrong


def one_rank_has_another_plan() -> None:
    from dfa_megatron.config import DistAttentionConfig

    if dist.get_rank() == 1:
        _calls_with(config=DistAttentionConfig(schedule="ring"))


def a_kernel_ignores_the_window() -> None:
    from dfa_megatron.kernels.adapters.cpu import CpuKernel

    for name in ("forward", "backward"):
        vars_of(CpuKernel, name, _without_left_bound(getattr(CpuKernel, name)))


def _without_left_bound(real: Any) -> Any:
    def wrong(self: Any, call: Any, *results: Any) -> Any:
        whole = call.segments
        parts = tuple(replace(s, band=replace(s.band, left=-1)) for s in whole.parts)
        return real(self, replace(call, segments=type(whole)(parts, whole.q_len, whole.kv_len)), *results)

    return wrong


def the_backward_has_stale_keys() -> None:
    """It computes with the keys of the first call of that shape."""
    from dfa_megatron.kernels.adapters.cpu import CpuKernel

    real, first = CpuKernel.backward, {}  # type: ignore[var-annotated]

    def wrong(self: Any, call: Any, *results: Any) -> Any:
        return real(self, replace(call, k=first.setdefault(call.k.shape, call.k.clone())), *results)

    vars_of(CpuKernel, "backward", wrong)


def the_optimizer_steps_on_unreduced_gradients() -> None:
    """In the run with the optimizer only: gradients stay each rank's own."""
    import megatron.core.distributed
    from megatron.core import optimizer

    real_finalize, real_optimizer = megatron.core.distributed.finalize_model_grads, optimizer.get_megatron_optimizer
    steps = []

    def with_optimizer(*args: Any, **kwargs: Any) -> Any:
        steps.append(True)
        return real_optimizer(*args, **kwargs)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if not steps:
            real_finalize(*args, **kwargs)

    vars(optimizer)["get_megatron_optimizer"] = with_optimizer
    vars(megatron.core.distributed)["finalize_model_grads"] = wrong


def a_rank_dies() -> None:
    if dist.get_rank() == 1:
        import os

        os._exit(9)


def the_incoming_state_is_dropped() -> None:
    """Every rank's recurrences start from zero."""
    from dfa_megatron.recurrence import passing

    vars(passing)["fold"] = lambda carries, matrix: None
