"""Fields of Megatron's TransformerConfig, with this package's options, that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.refusals import Asked, Refusal, Stage, stated

BOUNDARY = DistAttentionConfig(data_layout="boundary")
"""The options of a Megatron script without --dfa flags."""

_OWN_ATTENTION = "the model with Megatron's own attention, without this package's spec"


def several_ranks(a: Asked) -> bool:
    """Return whether the context-parallel group is known to have more than one rank."""
    return (a.context_parallel_size or 1) > 1


def _heads(a: Asked) -> int:
    """Return the query heads of a tensor-parallel rank."""
    return int((a.num_attention_heads or 0) // (a.tensor_model_parallel_size or 1))


def _kv_heads(a: Asked) -> int:
    """Return the kv heads of a tensor-parallel rank, 0 if they are unknown."""
    groups = int(a.num_query_groups or a.num_attention_heads or 0)
    return max(1, groups // int(a.tensor_model_parallel_size or 1)) if groups else 0


def _degree(a: Asked) -> int:
    """Return the number of ranks that exchange heads, 0 if the planner chooses."""
    return a.dfa_ulysses_degree if isinstance(a.dfa_ulysses_degree, int) else 0


def _modules(names: Any) -> Sequence[str]:
    return names or ()


CONFIG = Stage(
    "Megatron: when the model's configuration is read",
    (
        stated(
            "attention_dropout",
            "attention_dropout={attention_dropout}",
            "the block kernels have no dropout inside the softmax",
            "--attention-dropout 0.0 (dropout elsewhere, --hidden-dropout, works)",
            0.1,
        ),
        Refusal(
            lambda a: isinstance(a.window_size, int),
            "window_size={window_size}",
            "it is a pair: tokens to the left and to the right",
            "--window-size with two numbers",
            {"window_size": 128},
        ),
        stated(
            "attn_logit_softcapping",
            "attn_logit_softcapping={attn_logit_softcapping}",
            "Megatron-Core's attention does not cap scores, and neither does its replacement here",
            "a model without capped scores, or dist_flash_attn_func(softcap=...) in layers of your own",
            50.0,
        ),
        Refusal(
            lambda a: isinstance(a.window_size, Sequence) and a.window_size[1] > 0,
            "window_size={window_size}",
            "it reaches past the token, and attention is causal (Megatron's own attentions differ on its meaning)",
            "--window-size with 0 at its right",
            {"window_size": (128, 4)},
        ),
        *(
            stated(
                name,
                name,
                "it needs the largest logit of every head, and the logsumexp of the kernels may exceed it by log(keys)",
                f"no --{name.replace('_', '-')}",
            )
            for name in ("qk_clip", "log_max_attention_logit")
        ),
        *(
            stated(
                name,
                f"attention in fp8 ({name})",
                "the block kernels compute in the input's 16- or 32-bit dtype",
                "fp8 for the linear layers only",
            )
            for name in ("fp8_dot_product_attention", "fp8_multi_head_attention")
        ),
        Refusal(
            lambda a: a.recompute_granularity == "selective" and "core_attn" in _modules(a.recompute_modules),
            "selective recomputation of core_attn",
            "it would run the distributed attention and its messages a second time",
            "--recompute-granularity full (attention is saved, the rest recomputed), or selective without core_attn",
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
        Refusal(
            lambda a: a.recompute_granularity == "selective" and a.dfa_remat == "on",
            "remat='on' together with selective recomputation",
            "a layer would be recomputed inside its own recomputation",
            "--recompute-granularity full, or remat='auto'",
            {"recompute_granularity": "selective", "dfa_remat": "on"},
        ),
        Refusal(
            lambda a: (
                a.recompute_granularity == "full"
                and a.dfa_remat != "off"
                and a.recompute_method not in ("uniform", "block")
            ),
            "recompute_method={recompute_method!r}",
            "this package does not know the method",
            "--recompute-method uniform or block",
            {"recompute_granularity": "full", "recompute_method": "newer"},
        ),
        Refusal(
            lambda a: a.cuda_graph_impl not in ("none", None),
            "CUDA graphs (cuda_graph_impl={cuda_graph_impl!r})",
            "messages between ranks inside a captured layer are not tested",
            "--cuda-graph-impl none",
            {"cuda_graph_impl": "local"},
        ),
        Refusal(
            lambda a: a.enable_cuda_graph or a.external_cuda_graph,
            "CUDA graphs (enable_cuda_graph or external_cuda_graph)",
            "messages between ranks inside a captured layer are not tested",
            "--cuda-graph-impl none",
            {"enable_cuda_graph": True},
        ),
        stated(
            "overlap_moe_expert_parallel_comm",
            "overlap_moe_expert_parallel_comm",
            "it calls the parts of a layer directly, and so skips rematerialization and the order of the tokens",
            "no --overlap-moe-expert-parallel-comm",
        ),
        Refusal(
            lambda a: a.moe_expert_capacity_factor is not None and several_ranks(a),
            "moe_expert_capacity_factor with context_parallel_size={context_parallel_size}",
            "Megatron drops tokens by how many of a rank's own an expert gets, which depends on who holds which",
            "no --moe-expert-capacity-factor",
            {"moe_expert_capacity_factor": 1.0, "context_parallel_size": 2},
        ),
        Refusal(
            lambda a: "sinkhorn" in (a.moe_router_load_balancing_type or ()) and several_ranks(a),
            "moe_router_load_balancing_type={moe_router_load_balancing_type!r} with context_parallel_size="
            "{context_parallel_size}",
            "Megatron balances the experts over the tokens of each rank by itself",
            "--moe-router-load-balancing-type aux_loss",
            {"moe_router_load_balancing_type": "sinkhorn", "context_parallel_size": 2},
        ),
        Refusal(
            lambda a: a.moe_enable_routing_replay and several_ranks(a) and a.dfa_data_layout == "boundary",
            "moe_enable_routing_replay in data_layout='boundary'",
            "the routers see the tokens in another order than the caller, whose indices they would take for their own",
            "data_layout='contiguous' with batches of shard_batch, or 'zigzag'",
            {"moe_enable_routing_replay": True, "context_parallel_size": 2},
        ),
        Refusal(
            lambda a: a.experimental_attention_variant == "dsa",
            "experimental_attention_variant='dsa'",
            "an indexer chooses the keys of every token, and Megatron's own counts on tokens in zigzag order",
            f"{_OWN_ATTENTION}, with --cp-comm-type allgather (Megatron-Core 0.19 and later)",
            {"experimental_attention_variant": "dsa"},
        ),
        Refusal(
            lambda a: (
                (a.experimental_attention_variant == "gated_delta_net" or a.linear_attention_freq is not None)
                and several_ranks(a)
                and a.dfa_data_layout == "zigzag"
            ),
            "gated delta net among the layers of a GPT model in layout 'zigzag'",
            "these layers need tokens in order",
            "--dfa-data-layout contiguous or boundary",
            {"linear_attention_freq": 4, "context_parallel_size": 2, "dfa_data_layout": "zigzag"},
        ),
        Refusal(
            lambda a: a.experimental_attention_variant not in (None, "dsa", "gated_delta_net"),
            "experimental_attention_variant={experimental_attention_variant!r}",
            "this attention is softmax over all earlier keys, and the variant may be another function",
            _OWN_ATTENTION,
            {"experimental_attention_variant": "newer"},
        ),
        Refusal(
            lambda a: a.mtp_hsm and several_ranks(a),
            "mtp_hsm with context_parallel_size={context_parallel_size}",
            "it shifts hidden states over the ranks, and no gradient returns to the rank that a token came from",
            "no --mtp-hsm",
            {"mtp_hsm": True, "context_parallel_size": 2},
        ),
        stated(
            "hierarchical_context_parallel_sizes",
            "hierarchical_context_parallel_sizes",
            "the schedule runs over one flat context-parallel group",
            "no --hierarchical-context-parallel-sizes",
            [2, 2],
        ),
        stated(
            "use_kitchen_attention",
            "use_kitchen_attention",
            "this package computes attention with kernels of its own choice",
            "leaving it off",
        ),
        stated("batch_invariant_mode", "batch_invariant_mode", "the block kernels do not promise it", "leaving it off"),
        stated("flash_decode", "flash_decode", "it is for inference", "training and evaluation without a key cache"),
        Refusal(
            lambda a: a.transformer_impl == "inference_optimized",
            "transformer_impl='inference_optimized'",
            "it is for inference",
            "--transformer-impl local or transformer_engine",
            {"transformer_impl": "inference_optimized"},
        ),
        Refusal(
            lambda a: a.fine_grained_activation_offloading and "core_attn" in _modules(a.offload_modules),
            "offloading core_attn",
            "Megatron frees q, k and v once they are copied, which was not tried beside messages that read them",
            "--offload-modules without core_attn, or --dfa-remat-offload with --recompute-granularity full",
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
        ),
        Refusal(
            lambda a: (
                a.fine_grained_activation_offloading
                and (a.dfa_remat == "on" or (a.recompute_granularity == "full" and a.dfa_remat != "off"))
            ),
            "fine_grained_activation_offloading together with rematerialization",
            "a layer is recomputed in the backward, where Megatron would offload what it needs next",
            "one of the two; --dfa-remat-offload moves what rematerialization keeps to the host",
            {"fine_grained_activation_offloading": True, "dfa_remat": "on"},
        ),
        Refusal(
            lambda a: a.cpu_offloading and a.dfa_remat == "on",
            "cpu_offloading together with remat='on'",
            "Megatron does not combine offloading with recomputation",
            "one of the two",
            {"cpu_offloading": True, "dfa_remat": "on"},
        ),
        Refusal(
            lambda a: a.dfa_remat_offload and a.dfa_remat == "off",
            "remat_offload together with remat='off'",
            "without rematerialization there is nothing to offload",
            "remat='auto' or 'on'",
            {"dfa_remat_offload": True, "dfa_remat": "off"},
        ),
        Refusal(
            lambda a: a.num_microbatches_with_partial_activation_checkpoints is not None and a.dfa_remat != "off",
            "num_microbatches_with_partial_activation_checkpoints",
            "rematerialization recomputes the same layers in every micro-batch",
            "leaving it off, or remat='off'",
            {"num_microbatches_with_partial_activation_checkpoints": 1},
        ),
        Refusal(
            lambda a: a.dfa_loss_tile not in (None, "off") and a.defer_embedding_wgrad_compute,
            "loss_tile together with defer_embedding_wgrad_compute",
            "Megatron would keep the gradients of all logits until the pipeline is empty",
            "one of the two",
            {"dfa_loss_tile": 4096, "defer_embedding_wgrad_compute": True},
        ),
        Refusal(
            lambda a: a.dfa_mlp_tile not in (None, "off") and a.fp8,
            "mlp_tile together with fp8={fp8!r}",
            "its scales would follow every tile twice",
            "one of the two",
            {"dfa_mlp_tile": 4096, "fp8": "hybrid"},
        ),
        Refusal(
            # By the config: stages of a pipeline with dense layers alone would wait for those that refuse theirs.
            lambda a: a.dfa_mlp_tile not in (None, "off") and a.num_moe_experts,
            "mlp_tile together with num_moe_experts={num_moe_experts}",
            "only a dense MLP computes each token by itself; experts are chosen and balanced over all tokens",
            "--dfa-mlp-tile off",
            {"dfa_mlp_tile": 4096, "num_moe_experts": 8},
        ),
        Refusal(
            lambda a: a.dfa_schedule != "auto" and a.dfa_data_layout == "zigzag",
            "schedule={dfa_schedule!r} with zigzag data",
            "zigzag tokens share out the work, and every rank computes its own rows",
            "--dfa-schedule auto, or --dfa-data-layout contiguous or boundary",
            {"dfa_schedule": "ring", "dfa_data_layout": "zigzag"},
        ),
        Refusal(
            lambda a: _degree(a) > 1 and a.context_parallel_size and a.context_parallel_size % _degree(a),
            "ulysses_degree={dfa_ulysses_degree} with context_parallel_size={context_parallel_size}",
            "the degree must divide the context-parallel ranks",
            "a --dfa-ulysses-degree that divides them",
            {"dfa_ulysses_degree": 4, "context_parallel_size": 2},
        ),
        Refusal(
            lambda a: _degree(a) > 1 and _heads(a) % _degree(a),
            "ulysses_degree={dfa_ulysses_degree} with num_attention_heads={num_attention_heads}",
            "the degree must divide the query heads of a tensor-parallel rank",
            "a --dfa-ulysses-degree that divides them, or another tensor-parallel size",
            {"dfa_ulysses_degree": 2, "num_attention_heads": 5},
        ),
        Refusal(
            lambda a: not a.multi_latent_attention and _kv_heads(a) % (a.dfa_head_stages or 1),
            "head_stages={dfa_head_stages} with num_query_groups={num_query_groups}",
            "the stages must divide the kv heads of a tensor-parallel rank",
            "--dfa-head-stages that divides them",
            {"dfa_head_stages": 2, "num_query_groups": 1},
        ),
    ),
    BOUNDARY,
)


def check_config(config: Any, options: Any, **facts: Any) -> None:
    """Refuse a configuration that would give wrong numbers without an error.

    Args:
        config: Megatron's TransformerConfig, or a mapping of its fields; a missing field counts as unset.
        options: this package's DistAttentionConfig.
        facts: more about the model, by the names of fields.

    Raises:
        UnsupportedError: naming the field, the reason and an alternative.
    """
    CONFIG.check(config, options, **facts)
