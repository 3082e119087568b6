"""Check the configuration of a model: fields of Megatron that do not go together, or beside this package's options."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.router import has_losses
from dfa_megatron.megatron.tested_fields import check_fields
from dfa_megatron.plan.degree import check_degree


def check_config(config: Any, options: MegatronConfig) -> None:
    """Refuse a configuration that would give wrong numbers without an error.

    Args:
        config: Megatron's TransformerConfig, or any object with its fields; a missing one counts as unset.
        options: of this package.
    """
    fields = vars(config)
    check_fields(config)
    if fields.get("deterministic_mode") and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic_mode=True without torch.use_deterministic_algorithms",
            "attention obeys PyTorch's switch, which Megatron's own --deterministic-mode turns on",
            "torch.use_deterministic_algorithms(True) before the model is built",
        )
    if (window := fields.get("window_size")) and window[1] > 0:
        raise UnsupportedError(
            f"window_size={window}",
            "it reaches past the token, and attention is causal (Megatron's own attentions differ on its meaning)",
            "--window-size with 0 at its right",
        )
    _check_recomputation(fields, options)
    ranks = fields.get("context_parallel_size", 1)
    if ranks > 1:
        _check_over_ranks(fields, options)
    heads = (fields.get("num_attention_heads") or 0) // fields.get("tensor_model_parallel_size", 1)
    check_degree(options.fixed_degree, ranks, heads)


def check_uneven(config: Any, counts: list[int], tokens: int, rank: int) -> None:
    """Refuse a row that the ranks do not divide where a part of Megatron takes equal parts only.

    counts: tokens of every rank, as `shard_batch` cuts the row. tokens: those that this rank brings.
    """
    fields, total = vars(config), sum(counts)
    tp = fields["tensor_model_parallel_size"] if fields["sequence_parallel"] else 1
    equal = f"a row of {total} tokens on {len(counts)} context-parallel ranks"
    divides = f"a row whose length is a multiple of {len(counts) * tp}"
    if tokens != counts[rank]:
        what = f"{equal}, {tokens} of them on rank {rank}"
        raise UnsupportedError(what, f"the parts are {counts}", "a batch from shard_batch")
    if any(count % tp for count in counts):
        what = f"{equal} with sequence_parallel"
        raise UnsupportedError(what, f"{tp} ranks share each of the parts {counts}", divides)
    if fields["pipeline_model_parallel_size"] > 1 and not fields.get("variable_seq_lengths"):
        raise UnsupportedError(
            f"{equal} in a pipeline", "its stages expect equal parts", f"--variable-seq-lengths, or {divides}"
        )
    experts = fields.get("num_moe_experts")
    if experts and (has_losses(config) or fields["expert_model_parallel_size"] > 1):
        raise UnsupportedError(
            f"{equal} with a router's losses or expert parallelism", "Megatron counts equal parts there", divides
        )


def recomputes(fields: dict[str, Any], options: MegatronConfig) -> bool:
    """Return whether layers are recomputed without their attention."""
    full = fields.get("recompute_granularity") == "full" and options.saves_attention
    return full or options.checkpoint == "remat"


def _check_recomputation(fields: dict[str, Any], options: MegatronConfig) -> None:
    selective = fields.get("recompute_granularity") == "selective"
    if selective and not {"core_attn", "gdn"}.isdisjoint(fields.get("recompute_modules") or ()):
        raise UnsupportedError(
            "selective recomputation of core_attn or gdn",
            "it would run distributed attention, or a delta net, and its messages a second time",
            "--recompute-granularity full (attention is saved, the rest recomputed), or selective of other modules",
        )
    if selective and options.checkpoint == "remat":
        raise UnsupportedError(
            "checkpoint='remat' together with selective recomputation",
            "a layer would be recomputed inside its own recomputation",
            "--recompute-granularity full, or checkpoint='auto'",
        )
    beside = [name for name in ("mtp_num_layers", "moe_enable_routing_replay") if fields.get(name)]
    if fields.get("overlap_moe_expert_parallel_comm") and (beside or options.checkpoint == "remat"):
        raise UnsupportedError(
            f"overlap_moe_expert_parallel_comm with {beside[0] if beside else options.checkpoint}",
            "it calls the parts of a model and of its layers, and not their forwards, which do this",
            "one of them alone",
        )
    if options.checkpoint == "full" and fields.get("recompute_granularity") != "full":
        raise UnsupportedError(
            "checkpoint='full' in Megatron",
            "its own flags say which layers are recomputed with their attention",
            "--recompute-granularity full beside it, or checkpoint='remat'",
        )
    if options.remat_offload and not recomputes(fields, options):
        raise UnsupportedError(
            "remat_offload without --recompute-granularity full",
            "without rematerialization there is nothing to offload",
            "that flag, or checkpoint='remat'",
        )


def _check_over_ranks(fields: dict[str, Any], options: MegatronConfig) -> None:
    if "sinkhorn" in (fields.get("moe_router_load_balancing_type") or ()):
        raise UnsupportedError(
            "moe_router_load_balancing_type='sinkhorn' over several context-parallel ranks",
            "Megatron balances the experts by sinkhorn over the tokens of each rank by itself",
            "--moe-router-load-balancing-type aux_loss",
        )
    # Other variants than delta nets are refused.
    delta = fields.get("experimental_attention_variant") or fields.get("linear_attention_freq")
    if delta and options.data_layout == "zigzag":
        raise UnsupportedError(
            "gated delta net among the layers of a GPT model in layout 'zigzag'",
            "these layers need tokens in order",
            "--dfa-data-layout contiguous or boundary",
        )
