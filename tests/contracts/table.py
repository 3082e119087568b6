"""Every name, parameter and attribute of the frameworks that the package relies on beside what it plainly imports.

A plain import needs no row: `check.py` finds it. A row names what is replaced, subclassed, hooked or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """State what one name of a framework must offer.

    names: "module:name", the newest first; one of them must exist.
    ours: files of the package that rely on it.
    passes: arguments that we pass by name.
    replaced: the parameters of a function that ours takes the place of; None where nothing is replaced. A parameter
        that is not among them is new: read what it means, and add it.
    attributes: that we read, set or override on the class.
    """

    names: tuple[str, ...]
    ours: tuple[str, ...]
    passes: tuple[str, ...] = ()
    replaced: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()


def on(names: str, ours: str, *, passes: str = "", replaced: str | None = None, attributes: str = "") -> Contract:
    """Return a contract from words that spaces separate."""
    known = None if replaced is None else tuple(replaced.split())
    return Contract(tuple(names.split()), tuple(ours.split()), tuple(passes.split()), known, tuple(attributes.split()))


CORE = "megatron.core"
LAYER = f"{CORE}.transformer.transformer_layer:TransformerLayer"
ATTENTION = f"{CORE}.transformer.attention:Attention"

MEGATRON = (
    # The layer, its attention and its config.
    on(LAYER, "megatron/layers/layer.py",
       attributes="layer_number self_attention mlp pg_collection tp_group config"),
    on(f"{LAYER}.forward", "megatron/layers/layer.py",
       passes="context context_mask rotary_pos_emb packed_seq_params attention_mask"),
    on(f"{LAYER}.__init__", "megatron/layers/layer.py",
       passes="config submodules layer_number pg_collection"),
    on(ATTENTION, "megatron/layers/prediction.py megatron/layers/layer.py", attributes="core_attention"),
    on(f"{CORE}.transformer.attention:CoreAttentionBuilder.__call__ {CORE}.transformer.attention:Attention.__init__",
       "megatron/layers/core_attention.py"),
    on(f"{CORE}.transformer.dot_product_attention:DotProductAttention.__init__", "megatron/layers/core_attention.py",
       replaced="config layer_number attn_mask_type attention_type attention_dropout softmax_scale cp_comm_type "
                "pg_collection k_channels v_channels"),
    on(f"{CORE}.transformer.dot_product_attention:DotProductAttention.forward", "megatron/layers/core_attention.py",
       replaced="query key value attention_mask attn_mask_type attention_bias packed_seq_params"),
    on(f"{CORE}.transformer.dot_product_attention:DotProductAttention", "megatron/layers/core_attention.py",
       attributes="sharded_state_dict softmax_offset"),
    on(f"{CORE}.transformer.transformer_config:TransformerConfig",
       "megatron/layers/core_attention.py megatron/layers/layer.py megatron/layers/context.py",
       attributes="context_parallel_size tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel "
                  "num_layers num_attention_heads kv_channels normalization window_size window_attn_skip_freq "
                  "softmax_type perform_initialization init_method params_dtype deterministic_mode "
                  "recompute_granularity recompute_method recompute_num_layers distribute_saved_activations "
                  "cp_comm_type layernorm_zero_centered_gamma fp8 "
                  "moe_router_load_balancing_type calculate_per_token_loss"),
    on(f"{CORE}.process_groups_config:ProcessGroupCollection",
       "megatron/layers/core_attention.py megatron/layers/context.py",
       attributes="use_mpu_process_groups tp cp"),
    on(f"{CORE}.packed_seq_params:PackedSeqParams", "megatron/tokens/packs.py",
       attributes="qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
                  "max_seqlen_kv local_cp_size cp_group"),
    on(f"{CORE}.tensor_parallel.layers:set_tensor_model_parallel_attributes", "megatron/layers/core_attention.py",
       passes="is_parallel dim stride"),
    # Specs.
    on(f"{CORE}.transformer.spec_utils:ModuleSpec", "megatron/spec.py", passes="module params",
       attributes="module params submodules"),
    on(f"{CORE}.transformer.transformer_block:TransformerBlockSubmodules", "megatron/spec.py",
       passes="layer_specs layer_norm"),
    on(f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec", "megatron/script/script_specs.py",
       passes="normalization qk_layernorm multi_latent_attention qk_l2_norm"),
    on(f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
       "megatron/script/script_specs.py",
       passes="qk_layernorm multi_latent_attention qk_l2_norm"),
    on(f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec", "megatron/script/script_specs.py"),
    # The model's end: losses by tiles.
    on(f"{CORE}.models.common.language_module.language_module:LanguageModule", "megatron/output.py megatron/door.py",
       attributes="compute_language_model_loss cp_group pg_collection pp_group vp_stage vp_size"),
    on(f"{CORE}.models.gpt.gpt_model:GPTModel.forward", "megatron/door.py megatron/output.py",
       passes="labels input_ids position_ids decoder_input packed_seq_params extra_block_kwargs padding_mask "
              "inference_context"),
    on(f"{CORE}.models.hybrid.hybrid_model:HybridModel.forward {CORE}.models.mamba.mamba_model:MambaModel.forward",
       "megatron/door.py megatron/layers/context.py",
       passes="labels input_ids position_ids decoder_input packed_seq_params padding_mask inference_context"),
    on(f"{CORE}.models.gpt.gpt_model:GPTModel", "megatron/door.py megatron/output.py megatron/layers/context.py",
       attributes="set_input_tensor decoder rotary_pos_emb output_layer pre_process post_process "
                  "transformer_layer_spec"),
    on(f"{CORE}.tensor_parallel.mappings:gather_from_sequence_parallel_region", "megatron/tokens/visit.py",
       passes="tensor_parallel_output_grad group"),
    on(f"{CORE}.tensor_parallel.mappings:scatter_to_sequence_parallel_region", "megatron/tokens/visit.py",
       passes="group"),
    on(f"{CORE}.tensor_parallel.layers:ColumnParallelLinear", "megatron/output.py",
       attributes="gather_output weight bias skip_bias_add sequence_parallel tp_group"),
    on(f"{CORE}.tensor_parallel.layers:ColumnParallelLinear.forward", "megatron/output.py",
       replaced="input_ weight runtime_gather_output"),
    # Multi-token prediction.
    on(f"{CORE}.transformer.multi_token_prediction:roll_tensor", "megatron/layers/prediction.py",
       replaced="tensor shifts dims cp_group packed_seq_params return_sum"),
    on(f"{CORE}.transformer.multi_token_prediction:process_mtp_loss "  # since 0.19
       f"{CORE}.transformer.multi_token_prediction:roll_tensor", "megatron/layers/prediction.py",
       passes="cp_group packed_seq_params"),
    # Recomputation.
    on(f"{CORE}.tensor_parallel.random:checkpoint", "megatron/layers/layer.py",
       replaced="function distribute_saved_activations"),
    on(f"{CORE}.tensor_parallel.random:get_cuda_rng_tracker", "megatron/layers/layer.py"),
    on(f"{CORE}.transformer.mlp:MLP.forward", "megatron/layers/layer.py"),
    # Experts.
    on(f"{CORE}.transformer.moe.router:TopKRouter", "megatron/layers/router.py",
       attributes="tp_cp_group routing calculate_per_token_loss config"),
    on(f"{CORE}.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss", "megatron/layers/router.py",
       passes="valid_token_count"),
    on(f"{CORE}.transformer.moe.router:z_loss_func", "megatron/layers/router.py",
       replaced="logits z_loss_coeff padding_mask"),
    on(f"{CORE}.transformer.moe.router:get_tokens_per_expert_and_token_count", "megatron/layers/router.py",
       replaced="routing_map reduce_group topk with_padding_mask"),
    # The groups that a layer was built with.
    on(f"{CORE}.parallel_state:_CONTEXT_PARALLEL_GROUP", "megatron/layers/layer.py"),
    # Rotary tables.
    on(f"{CORE}.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding", "megatron/layers/rotary.py",
       attributes="cp_group get_cached_cos_sin"),
    on(f"{CORE}.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
       "megatron/layers/rotary.py", replaced="max_seq_len offset packed_seq cp_group"),
    on(f"{CORE}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding", "megatron/layers/rotary.py",
       attributes="cp_group"),
    on(f"{CORE}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward", "megatron/layers/rotary.py",
       replaced="max_seq_len offset packed_seq cp_group"),
    on(f"{CORE}.models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding", "megatron/layers/rotary.py",
       attributes="cp_group"),
    # Hybrids.
    on(f"{CORE}.models.hybrid.hybrid_block:HybridStack {CORE}.ssm.mamba_block:MambaStack",
       "megatron/door.py", attributes="input_tensor"),
    on(f"{CORE}.models.hybrid.hybrid_layer_specs:hybrid_stack_spec "
       f"{CORE}.models.mamba.mamba_layer_specs:mamba_stack_spec", "megatron/script/script_specs.py"),
    on(f"{CORE}.ssm.mamba_mixer:MambaMixer", "megatron/in_order.py",
       attributes="_ssm_training use_mem_eff_path cp d_state headdim chunk_size D_has_hdim rmsnorm norm config"),
    on(f"{CORE}.ssm.mamba_mixer:MambaMixer._ssm_training", "megatron/in_order.py",
       replaced="zxBCdt packed_seq_params"),
    on(f"{CORE}.ssm.mamba_mixer:causal_conv1d_fn", "megatron/in_order.py"),
    on(f"{CORE}.ssm.mamba_mixer:mamba_chunk_scan_combined", "megatron/in_order.py"),
    on(f"{CORE}.ssm.mamba_context_parallel:MambaContextParallel", "megatron/in_order.py",
       attributes="d_inner_local_tpcp ngroups_local_tpcp nheads_local_tpcp get_conv1d_weight get_conv1d_bias "
                  "get_dt_bias get_D get_A_log"),
    on(f"{CORE}.ssm.gated_delta_net:GatedDeltaNet", "megatron/in_order.py", attributes="forward config"),
    on(f"{CORE}.ssm.gated_delta_net.gdn:chunk_gated_delta_rule {CORE}.ssm.gated_delta_net:chunk_gated_delta_rule",
       "megatron/in_order.py"),
    on(f"{CORE}.ssm.gated_delta_net.gdn:causal_conv1d {CORE}.ssm.gated_delta_net:causal_conv1d "
       f"{CORE}.ssm.gated_delta_net:causal_conv1d_fn", "megatron/in_order.py"),
    # The proof of a job.
    on(f"{CORE}.distributed.distributed_data_parallel:DistributedDataParallel", "megatron/proved_job.py",
       attributes="bucket_groups expert_parallel_bucket_groups zero_grad_buffer module"),
    on(f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucket", "megatron/proved_job.py",
       attributes="grad_data param_to_index"),
    on(f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup", "megatron/proved_job.py",
       attributes="buckets ddp_config intra_distributed_optimizer_instance_size "
                  "intra_distributed_optimizer_instance_rank"),
    on(f"{CORE}.pipeline_parallel.schedules:forward_backward_no_pipelining", "megatron/proved_job.py",
       passes="forward_step_func data_iterator model num_microbatches seq_length micro_batch_size forward_only"),
    on(f"{CORE}.transformer.dot_product_attention:DotProductAttention.__init__", "megatron/proved_job.py",
       passes="config layer_number attn_mask_type attention_type"),
    on(f"{CORE}.model_parallel_config:ModelParallelConfig", "megatron/proved_job.py",
       attributes="finalize_model_grads_func grad_scale_func"),
    on(f"{CORE}.transformer.multi_token_prediction:MTPLossAutoScaler.set_loss_scale", "megatron/proved_job.py"),
    on(f"{CORE}.transformer.multi_token_prediction:MTPLossLoggingHelper", "megatron/proved_job.py",
       attributes="tracker"),
    on(f"{CORE}.rerun_state_machine:RerunStateMachine", "megatron/proved_job.py", attributes="mode"),
)  # fmt: skip
"""Of megatron.core."""

MEGATRON_TRAINING = (
    on("megatron.training.arguments:add_megatron_arguments", "megatron/script/dfa_flags.py", replaced="parser"),
    on("megatron.training:get_args megatron.training.global_vars:get_args", "megatron/script/dfa_flags.py"),
    on("megatron.training.training:train_step", "megatron/proved_job.py",
       passes="forward_step_func data_iterator model"),
)  # fmt: skip
"""Of megatron.training, which wheels have since 0.19."""

TRANSFORMERS = (
    on("transformers.modeling_utils:PreTrainedModel", "huggingface/distribute.py huggingface/checkpointing.py",
       attributes="set_attn_implementation get_decoder get_input_embeddings get_output_embeddings "
                  "loss_function gradient_checkpointing_enable enable_input_require_grads config "
                  "supports_gradient_checkpointing"),
    on("transformers.configuration_utils:PreTrainedConfig transformers.configuration_utils:PretrainedConfig",
       "huggingface/distribute.py",
       attributes="get_text_config sub_configs _attn_implementation _attn_implementation_internal model_type"),
    on("transformers.modeling_utils:AttentionInterface", "huggingface/attention_function.py", attributes="register"),
    on("transformers.masking_utils:AttentionMaskInterface", "huggingface/attention_function.py", attributes="register"),
    on("transformers.modeling_layers:GradientCheckpointingLayer",
       "huggingface/checkpointing.py huggingface/hook_mixers.py",
       attributes="gradient_checkpointing"),
    on("transformers.loss.loss_utils:ForCausalLMLoss", "huggingface/tiled_head.py",
       replaced="logits labels vocab_size num_items_in_batch ignore_index shift_labels"),
    on("transformers.trainer:Trainer", "huggingface/trainer.py",
       attributes="compute_loss prediction_step _get_num_items_in_batch _prepare_context_parallel_inputs get_cp_size "
                  "floating_point_ops gather_function accelerator label_smoother compute_loss_func model_init "
                  "model_accepts_loss_kwargs args"),
    on("transformers.trainer:Trainer.prediction_step", "huggingface/trainer.py",
       replaced="model inputs prediction_loss_only ignore_keys"),
    on("transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func", "huggingface/loss.py",
       replaced="gate_logits num_experts top_k attention_mask"),
    on("transformers.training_args:TrainingArguments", "huggingface/trainer.py",
       attributes="average_tokens_across_devices neftune_noise_alpha "
                  "gradient_checkpointing eval_use_gather_object torch_compile"),
)  # fmt: skip

ACCELERATE = (
    on("accelerate.accelerator:Accelerator", "huggingface/accelerator.py",
       attributes="_prepare_device_mesh _prepare_deepspeed prepare_data_loader gather_for_metrics gather _schedulers "
                  "dataloader_config parallelism_config dispatch_batches distributed_type gradient_state "
                  "num_processes device"),
    on("accelerate.accelerator:Accelerator.gather_for_metrics", "huggingface/accelerator.py",
       replaced="input_data use_gather_object"),
    on("accelerate.parallelism_config:ParallelismConfig", "huggingface/accelerator.py",
       attributes="cp_size sp_size tp_size"),
    on("accelerate.state:AcceleratorState", "huggingface/model_inputs.py",
       attributes="_shared_state"),
    on("accelerate.state:GradientState", "huggingface/accelerator.py",
       attributes="active_dataloader remainder end_of_dataloader"),
)  # fmt: skip

DEEPSPEED = (
    on("deepspeed:initialize", "deepspeed/initialize.py deepspeed/install.py",
       replaced="args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
                "dist_init_required collate_fn config mesh_param config_params"),
    on("deepspeed.runtime.engine:DeepSpeedEngine", "deepspeed/engine.py",
       attributes="sequence_parallel_size seq_data_parallel_group compile deepspeed_io"),
    on("deepspeed.runtime.engine:DeepSpeedEngine", "deepspeed/proved_engine.py",
       attributes="micro_steps gradient_accumulation_steps zero_optimization_stage zero_grad optimizer "
                  "set_gradient_accumulation_boundary _is_gradient_accumulation_boundary"),
    on("deepspeed.runtime.engine:DeepSpeedEngine.backward", "deepspeed/proved_engine.py", passes="loss scale_wrt_gas"),
    on("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer", "deepspeed/proved_engine.py",
       attributes="averaged_gradients all_grad_tensors micro_step_id zero_grad"),
    on("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", "deepspeed/proved_engine.py",
       attributes="averaged_gradients micro_step_id _epilogue_ran_this_backward zero_grad"),
    on("deepspeed.runtime.pipe.module:PipelineModule", "deepspeed/pipeline.py",
       attributes="topology activation_checkpoint_func activation_checkpoint_interval"),
    on("deepspeed.runtime.activation_checkpointing.checkpointing:configure", "deepspeed/checkpointing.py",
       passes="checkpoint_in_cpu synchronize"),
    on("deepspeed.runtime.activation_checkpointing.checkpointing:non_reentrant_checkpoint", "deepspeed/pipeline.py"),
)  # fmt: skip

TABLE: Mapping[str, tuple[Contract, ...]] = {
    "megatron.core": MEGATRON, "megatron.training": MEGATRON_TRAINING, "transformers": TRANSFORMERS,
    "accelerate": ACCELERATE, "deepspeed": DEEPSPEED,
}  # fmt: skip
"""Contracts by the package whose sources they are read from."""
