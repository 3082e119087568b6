"""DeepSpeed's JSON beside the block: what tests compared with one process passes, and other keys are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dfa_megatron.errors import UnsupportedError

UNTESTED = "no test compares its gradients, beside distributed attention, with those of one process"
NO_MESH = "DeepSpeed's mesh does not reduce gradients over the ranks of a sequence at ZeRO 0, 1 and 2"


def _keys(names: str, values: tuple[Any, ...] | None = None) -> dict[str, Any]:
    return dict.fromkeys(names.split(), values)


_FLOAT32 = ("fp32", "float32")
_BF16 = _keys("enabled check_grad_overflow")
TESTED: Mapping[str, Any] = {
    "zero_optimization": {
        **_keys("stage overlap_comm contiguous_gradients reduce_scatter round_robin_gradients allgather_partitions"),
        **_keys("reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size"),
        **_keys("stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold"),
        **_keys("stage3_gather_16bit_weights_on_model_save log_trace_cache_warnings enable_sanity_checks"),
        **_keys("ignore_unused_parameters memory_efficient_linear load_from_fp32_weights compute_grad_norm", (True,)),
        **_keys("zero_hpz_partition_size mics_shard_size", (-1, 0, 1)),
        "offload_param": _keys("device pin_memory nvme_path buffer_count buffer_size max_in_cpu"),
        "offload_optimizer": _keys("device pin_memory nvme_path buffer_count pipeline_read pipeline_write fast_init")
        | {"ratio": (1,)},
    },
    "bf16": _BF16,
    "bfloat16": _BF16,
    "data_types": {"grad_accum_dtype": _FLOAT32},
    **_keys("communication_data_type seq_parallel_communication_data_type", _FLOAT32),
    **_keys("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"),
    **_keys("prescale_gradients gradient_predivide_factor optimizer scheduler sequence_parallel_size"),
    **_keys("dist_flash_attention zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    "gradient_allreduce_op": ("mean",),
    "managed_gradient_accumulation": (True,),
    "pipeline": _keys("use_reentrant activation_checkpoint_interval")
    | {"stages": ("auto",), "partition": ("best",), "pipe_partitioned": (True,), "grad_partitioned": (True,)},
    "activation_checkpointing": _keys("cpu_checkpointing synchronize_checkpoint_boundary profile")
    | _keys("contiguous_memory_optimization number_checkpoints"),  # the engine ignores these
    # Logs, monitors and files have no part in a gradient.
    **_keys("aio autotuning checkpoint comet comms_logger csv_monitor dataloader_drop_last datastates_ckpt"),
    **_keys("disable_python_gc dump_state flops_profiler log_level memory_breakdown monitor_config nebula"),
    **_keys("steps_per_print tensorboard timers vocabulary_size wall_clock_breakdown wandb"),
}
"""The keys that may be set: to anything (None), to one of several values, or to a section with such keys."""

REFUSED = {
    "data_parallel_size": (NO_MESH, "dist_flash_attention.size alone"),
    "sparse_gradients": (UNTESTED, "dense gradients"),
    "torch_autocast.enabled": (
        "it sums the gradients of a sequence's ranks in the autocast dtype, and no test compares them with those of "
        "one process",
        "bf16.enabled, whose gradients are summed in float32",
    ),
    "fp16.enabled": (UNTESTED, "bf16.enabled, whose gradients are summed in float32"),
    "compile.passes": (UNTESTED, "no compile passes; autosp is another sequence parallelism"),
    "activation_checkpointing.partition_activations": (
        "it divides activations among ranks that hold the same ones, but the ranks of a sequence hold different tokens",
        "partition_activations false; cpu_checkpointing keeps them on the host",
    ),
    "gradient_allreduce_op": ("the loss is scaled for the mean over all ranks", "'mean'"),
}
"""The reason and the alternative of keys that have their own."""

_SWITCHES = {"compile": "deepcompile", "tensor_parallel": "autotp_size"}
"""The key that turns a section on, where it is not `enabled`."""


def _untested(settings: Mapping[str, Any], tested: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every key that asks for something no test compared."""
    for key, value in settings.items():
        path, known = f"{before}{key}", tested.get(key, {})
        if value is None or value == "auto" or known is None or key.startswith(("$", "_")):
            continue
        if isinstance(value, Mapping):
            if value.get(_SWITCHES.get(path, "enabled"), True) not in (False, 0, None, "auto"):
                yield from _untested(value, known if isinstance(known, Mapping) else {}, f"{path}.")
        elif value not in known if isinstance(known, tuple) else value:
            yield path, value


def check_settings(settings: Mapping[str, Any], size: int | None) -> None:
    """Refuse keys of DeepSpeed's JSON that contradict the block, or that no test compared.

    Raises:
        UnsupportedError: names the key.
    """
    for key, value in _untested(settings, TESTED):
        asked = f"{key}={value!r} with dist_flash_attention"
        if key in REFUSED:
            raise UnsupportedError(asked, *REFUSED[key])
        raise UnsupportedError(asked, UNTESTED, "leaving it out")
    check_sizes("sequence_parallel_size", settings.get("sequence_parallel_size"), size)


def check_sizes(source: str, theirs: int | None, size: int | None) -> None:
    """Compare the number of ranks that share a sequence in the block with the number in another place.

    Raises:
        UnsupportedError: they differ.
    """
    if theirs is not None and type(theirs) is not int:
        raise UnsupportedError(f"{source}={theirs!r}", "it must be a number of ranks", "for example 8")
    if theirs is not None and size is not None and theirs != size:
        raise UnsupportedError(
            f"{source}={theirs} beside dist_flash_attention.size={size}",
            "both give the number of ranks that share a sequence",
            "one of them, or the same number",
        )


def check_filled_in(settings: Mapping[str, Any], before: str = "") -> None:
    """Refuse values "auto" outside DeepSpeed's typed sections, which read it as their default.

    Raises:
        UnsupportedError: names the key.
    """
    for key, value in settings.items():
        if value == "auto":
            raise UnsupportedError(
                f"{before}{key}='auto'",
                "only HF Trainer and accelerate fill it in",
                "a number, or HF Trainer with dfa_megatron.huggingface.distribute_trainer",
            )
        if isinstance(value, Mapping) and (before or key in ("optimizer", "scheduler")):
            check_filled_in(value, f"{before}{key}.")
