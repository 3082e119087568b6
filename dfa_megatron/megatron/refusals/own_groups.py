"""Micro-batches with a context-parallel group of their own that are refused."""

from __future__ import annotations

from typing import Any

from dfa_megatron.megatron.refusals.model_config import BOUNDARY
from dfa_megatron.refusals import Asked, Refusal, Stage, stated

_FIXED = "micro-batches without local_cp_size and cp_group"
_GROUPED = ("none", "aux_loss", "seq_aux_loss")
"""How a router may balance its experts: by the tokens of the ranks that share a micro-batch."""


def _weighted(a: Asked) -> list[str]:
    """Return the ways in which a router balances its experts, without losses of weight 0."""
    kinds: Any = a.moe_router_load_balancing_type or ()
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients: Any = a.moe_aux_loss_coeff
    coefficients = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients or 0.0] * len(kinds)
    return [kind for kind, weight in zip(kinds, coefficients, strict=False) if weight or not kind.endswith("aux_loss")]


def _has_loss(a: Asked) -> bool:
    return bool(a.moe_z_loss_coeff) or any(kind.endswith("aux_loss") for kind in _weighted(a))


OWN_GROUPS = Stage(
    "Megatron: when a micro-batch names its own context-parallel group",
    (
        stated(
            "foreign_group",
            "packed_seq_params whose cp_group does not hold this rank",
            "this rank has no tokens of the micro-batch",
            "the group of this rank with local_cp_size ranks",
        ),
        Refusal(
            lambda a: a.group_size is None and (a.local_cp_size or 1) != 1,
            "packed_seq_params with local_cp_size={local_cp_size} and no cp_group",
            "the ranks that share the micro-batch are unknown",
            "cp_group as well; without it, local_cp_size=1",
            {"local_cp_size": 2},
        ),
        Refusal(
            lambda a: a.group_size is not None and a.local_cp_size not in (None, a.group_size),
            "packed_seq_params with local_cp_size={local_cp_size} and a cp_group of {group_size} ranks",
            "the micro-batch is cut among one of these numbers of ranks",
            "local_cp_size={group_size}",
            {"local_cp_size": 2, "group_size": 4},
        ),
        Refusal(
            lambda a: a.recurs and a.dfa_data_layout == "zigzag",
            "a cp_group of a micro-batch in layout 'zigzag' of a model with Mamba or gated delta net layers",
            "these layers are Megatron's own, and exchange heads over the model's context-parallel group",
            f"--dfa-data-layout boundary or contiguous, or {_FIXED}",
            {"recurs": True, "dfa_data_layout": "zigzag"},
        ),
        Refusal(
            lambda a: "sinkhorn" in _weighted(a) or a.moe_expert_capacity_factor is not None,
            "a cp_group of a micro-batch with experts chosen by sinkhorn or moe_expert_capacity_factor",
            "both count the tokens of one rank, which depends on who holds which",
            "--moe-router-load-balancing-type aux_loss without --moe-expert-capacity-factor",
            {"moe_router_load_balancing_type": "sinkhorn"},
        ),
        Refusal(
            lambda a: set(_weighted(a)) - set(_GROUPED),
            "a cp_group of a micro-batch with moe_router_load_balancing_type={moe_router_load_balancing_type!r}",
            "it is of all ranks at once, which may run different numbers of micro-batches",
            f"aux_loss, seq_aux_loss, or {_FIXED}",
            {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01},
        ),
        Refusal(
            lambda a: _has_loss(a) and (a.tensor_model_parallel_size or 1) > 1,
            "a cp_group of a micro-batch with a router's losses and tensor_model_parallel_size="
            "{tensor_model_parallel_size}",
            "Megatron has no group of its ranks and their tensor-parallel ranks to sum them over",
            f"moe_aux_loss_coeff=0 and no moe_z_loss_coeff, or {_FIXED}",
            {"moe_z_loss_coeff": 0.001, "tensor_model_parallel_size": 2},
        ),
        Refusal(
            lambda a: _has_loss(a) and a.recompute_granularity == "selective" and "moe" in (a.recompute_modules or ()),
            "a cp_group of a micro-batch with a router's losses and selective recomputation of moe",
            "another micro-batch may have run before the recomputation, which would sum them over its group",
            "--recompute-granularity full",
            {"moe_z_loss_coeff": 0.001, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
    ),
    BOUNDARY,
)
