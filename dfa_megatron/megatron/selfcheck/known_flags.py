"""Names of Megatron's flags that the self-check reads but need not run; any other name that nobody knows is listed."""

from __future__ import annotations

FUSED_OFF = {
    "no_rope_fusion": "rotary embeddings",
    "no_bias_swiglu_fusion": "bias and activation",
    "no_bias_gelu_fusion": "bias and activation",
    "no_masked_softmax_fusion": "softmax",
    "no_bias_dropout_fusion": "bias and dropout",
    "no_gradient_accumulation_fusion": "gradient accumulation",
}
"""Flags that switch off a fused kernel that Megatron's scripts use by themselves, and its name in the table."""

_LEARNING_RATES = """
    decoupled_lr decoupled_min_lr lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init
    lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style min_lr
"""
"""Flags of the learning rate's schedule; three steps at one rate stand for it, which the table says."""

_OTHERS = """
    async_save ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save ckpt_format
    ckpt_fully_parallel_load ckpt_fully_parallel_save ckpt_step no_ckpt_fully_parallel_save
    dist_ckpt_format dist_ckpt_strictness exit_on_missing_checkpoint finetune auto_detect_ckpt_format
    load no_load_optim no_load_rng no_save_optim no_save_rng override_opt_param_scheduler pretrained_checkpoint
    save save_interval save_retain_interval non_persistent_save_interval use_checkpoint_args
    use_checkpoint_opt_param_scheduler use_dist_ckpt

    data_args_path data_cache_path data_path dataloader_type merge_file mock_data no_mmap_bin_files
    num_dataset_builder_threads num_workers split test_data_path tokenizer_model tokenizer_type train_data_path
    valid_data_path vocab_file null_tokenizer_eod_id null_tokenizer_pad_id make_vocab_size_divisible_by
    padded_vocab_size tiktoken_pattern tokenizer_special_tokens trust_remote_code

    eval_interval eval_iters exit_duration_in_mins exit_interval exit_signal exit_signal_handler full_validation
    skip_train train_iters train_samples

    app_tag_run_name app_tag_run_version log_batch_size_to_tensorboard log_device_memory_used log_energy log_interval
    log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard log_memory_interval log_memory_to_tensorboard
    log_num_zeros_in_grad log_params_norm log_progress log_straggler log_throughput log_timers_to_tensorboard
    log_validation_ppl_to_tensorboard log_world_size_to_tensorboard logging_level no_one_logger one_logger_async
    one_logger_project one_logger_run_name tensorboard_dir tensorboard_log_interval tensorboard_queue_size
    timing_log_level timing_log_option wandb_entity wandb_exp_name wandb_project wandb_save_dir

    memory_snapshot_path nvtx_ranges profile profile_ranks profile_step_end profile_step_start
    pytorch_profiler_collect_shapes record_memory_history record_shapes use_pytorch_profiler

    distributed_backend distributed_timeout_minutes flight_recorder_dump_path high_priority_stream_groups
    local_rank nccl_communicator_config_path

    check_for_large_grads empty_unused_memory_level manual_gc manual_gc_interval no_check_for_nan_in_loss_and_grad
    no_manual_gc_eval rerun_mode train_sync_interval

    hysteresis init_method_xavier_uniform initial_loss_scale loss_scale loss_scale_window min_loss_scale
    no_initialization no_persist_layer_norm seed use_flash_attn use_mcore_models
"""

NO_PART = frozenset(_LEARNING_RATES.split()) | frozenset(_OTHERS.split())
"""Where data and weights come from, what is saved, logged and profiled, when a run ends, and what float32 needs not."""
