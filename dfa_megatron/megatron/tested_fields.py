"""Megatron's configuration: the fields that may be set, and other ones are refused unless they are at their defaults.

Listed is what tests compared with one rank, and what treats each token alone or has no part in a number.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from dfa_megatron.errors import UnsupportedError

_ANY = """
_cpu_offloading_context account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func
activation_func_clamp_value activation_func_fp8_input_store add_bias_linear add_qkv_bias apply_query_key_layer_scaling
apply_residual_connection_post_layernorm apply_rope_fusion async_tensor_model_parallel_allreduce attention_backend
attention_output_gate attention_softmax_in_fp32 autocast_dtype barrier_with_L1_time batch_p2p_comm batch_p2p_sync
beta_fast beta_slow bf16 bias_activation_fusion bias_dropout_fusion calculate_per_token_loss
clone_scatter_output_in_embedding config_logger_dir context_parallel_size cp_comm_type cross_entropy_fusion_impl
cross_entropy_loss_fusion cuda_graph_modules cuda_graph_scope deallocate_pipeline_outputs deterministic_mode
disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache distribute_saved_activations
embedding_init_method embedding_init_method_std enable_autocast expert_model_parallel_size expert_tensor_parallel_size
ffn_hidden_size finalize_model_grads_func first_last_layers_bf16 flash_attention_version fp16 fp32_residual_connection
fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_param fp8_quantizer_factory fp8_recipe
fp8_wgrad fused_single_qkv_rope gated_linear_unit glu_linear_offset grad_scale_func grad_sync_func
gradient_accumulation_fusion hetereogenous_dist_checkpoint heterogeneous_block_specs
heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path hidden_dropout hidden_size
hybrid_context_parallel inference_cuda_graph_scope inference_sampling_seed init_method init_method_std
init_model_with_meta_device is_hybrid_model kda_lower_bound kda_safe_gate kv_channels kv_lora_rank layernorm_epsilon
layernorm_zero_centered_gamma linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
linear_num_value_heads linear_value_head_dim log_max_attention_logit mamba_head_dim mamba_num_groups mamba_num_heads
mamba_state_dim masked_softmax_fusion max_seqlen_per_dp_cp_rank memory_efficient_layer_norm
microbatch_group_size_per_vp_stage moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay
moe_ffn_hidden_size moe_flex_dispatcher_backend moe_grad_scale_func moe_grouped_gemm moe_hybridep_num_sms moe_layer_freq
moe_per_layer_logging moe_permute_fusion moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
moe_router_force_load_balancing moe_router_fusion moe_router_group_topk moe_router_load_balancing_type
moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax
moe_router_score_function moe_router_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor
moe_shared_expert_gate moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_token_dispatcher_type
moe_z_loss_coeff mrope_section mscale mscale_all_dim mtp_grad_scale_func mtp_loss_scaling_factor mtp_num_layers
mtp_standalone mtp_use_repeated_layer multi_latent_attention no_rope_freq no_sync_func normalization num_attention_heads
num_layers num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage num_moe_experts num_query_groups original_max_position_embeddings
output_layer_init_method overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush param_sync_func
params_dtype per_block_parameters perform_initialization persist_layer_norm pipeline_dtype
pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_size q_lora_rank qk_clip
qk_clip_alpha qk_clip_threshold qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim recompute_granularity
recompute_method recompute_modules recompute_num_layers rope_type rotary_base rotary_interleaved rotary_percent
rotary_scaling_factor sequence_parallel softmax_scale softmax_type tensor_model_parallel_size test_mode timers
tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag
tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_only_amax_red
transformer_impl use_cpu_initialization use_fused_weighted_squared_relu use_mamba_mem_eff_path use_te_activation_func
use_te_rng_tracker v_head_dim variable_seq_lengths virtual_pipeline_model_parallel_size window_attn_skip_freq
window_size
"""

TRIED: dict[str, tuple[Any, ...] | None] = dict.fromkeys(_ANY.split()) | {
    "attention_dropout": (0.0,),
    "cuda_graph_impl": (None, "none"),
    "experimental_attention_variant": (None, "gated_delta_net", "gdn", "kda"),
    "expert_tensor_parallel_num_weight_shards": (None, 1),
    "tensor_parallel_num_weight_shards": (None, 1),
}
"""The fields of 0.16.1 and 0.19.2 that may be set: to anything (None), or to one of several values."""

REFUSED = {
    "attention_dropout": (
        "the block kernels have no dropout inside the softmax",
        "--attention-dropout 0.0 (dropout elsewhere, --hidden-dropout, works)",
    ),
    "attn_logit_softcapping": (
        "Megatron-Core's attention does not cap scores, and neither does its replacement here",
        "a model without capped scores, or dist_flash_attn_func(softcap=...) in layers of your own",
    ),
    "cuda_graph_impl": (
        "a layer's graph replaces its forward, which tells attention the documents and keeps its results",
        "no --cuda-graph-impl",
    ),
    "experimental_attention_variant": (
        "this attention is softmax over all earlier keys, and the variant may be another function",
        "the model with Megatron's own attention, for dsa with --cp-comm-type allgather (Megatron-Core 0.19 and later)",
    ),
    "moe_expert_capacity_factor": (
        "Megatron drops tokens by how many of a rank's own an expert gets, which depends on who holds which",
        "no --moe-expert-capacity-factor",
    ),
    "mtp_hsm": (
        "it shifts hidden states over the ranks, and no gradient returns to the rank that a token came from",
        "no --mtp-hsm",
    ),
}
"""The reason and the alternative of fields that have their own."""


def check_fields(config: Any) -> None:
    """Refuse fields that no test compared with one rank, and that are not at their defaults.

    A field of a newer Megatron may be a cap, a sink or a scale. Fields of other classes, such as a subclass's, are not
    Megatron's to read.
    """
    defaults = dict.fromkeys(REFUSED) | _defaults(type(config))
    for name, value in vars(config).items():
        values = TRIED.get(name, (defaults[name],) if name in defaults else None)
        if values is None or value in values:
            continue
        if name in REFUSED:
            raise UnsupportedError(f"{name}={value!r}", *REFUSED[name])
        raise UnsupportedError(
            f"{name}={value!r}", "no test compared it with one rank", f"leaving it at {values[-1]!r}"
        )


def _defaults(kind: type) -> dict[str, Any]:
    """Return the fields of Megatron's own class with their defaults."""
    own = next((each for each in kind.__mro__ if each.__module__.startswith("megatron.core.")), None)
    return {
        x.name: x.default if x.default_factory is MISSING else x.default_factory() for x in (fields(own) if own else ())
    }
