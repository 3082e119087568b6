"""What DeepSpeed can be asked for that contradicts distributed attention, or was not compared with one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfa_megatron.deepspeed.mesh import Mesh
from dfa_megatron.deepspeed.sequence_groups import SequenceGroups
from dfa_megatron.errors import UnsupportedError

OLDEST = (0, 19, 6)
"""The oldest version of DeepSpeed that was compared with one process and found right."""

_UNTESTED = "its gradients beside distributed attention have not been compared with those of one process"

_KEYS: dict[str, tuple[str, str]] = {
    "data_parallel_size": (
        "DeepSpeed's mesh does not reduce gradients over the ranks of a sequence at ZeRO 0, 1 and 2",
        "dist_flash_attention.size alone",
    ),
    "sparse_gradients": (_UNTESTED, "dense gradients"),
    "tensor_parallel.autotp_size": (_UNTESTED, "tensor_parallel.autotp_size 0"),
    "hybrid_engine.enabled": (_UNTESTED, "hybrid_engine.enabled false"),
    "torch_autocast.enabled": (
        "it sums the gradients of a sequence's ranks in the autocast dtype, and has not been compared with one process",
        "bf16.enabled, whose gradients are summed in float32",
    ),
    "compile.deepcompile": (_UNTESTED, "compile.deepcompile false"),
    "compile.passes": (_UNTESTED, "no compile passes; autosp is another sequence parallelism"),
    "zero_optimization.zero_quantized_weights": (_UNTESTED, "false"),
    "zero_optimization.zero_quantized_nontrainable_weights": (_UNTESTED, "false"),
    "zero_optimization.zero_quantized_gradients": (_UNTESTED, "false"),
    "activation_checkpointing.partition_activations": (
        "it divides activations among ranks that hold the same ones; the ranks of a sequence hold different tokens",
        "partition_activations false; cpu_checkpointing keeps them on the host",
    ),
}
"""Keys that must be absent, false, 0 or empty, by their path in the JSON: why, and what works."""


def check_settings(settings: Mapping[str, Any], size: int | None) -> None:
    """Refuse keys of DeepSpeed's JSON that contradict the block.

    Raises:
        UnsupportedError: names the key.
    """
    for path, (why, instead) in _KEYS.items():
        if value := _at(settings, path):
            raise UnsupportedError(f"{path}={value!r} with dist_flash_attention", why, instead)
    if (value := _at(settings, "zero_optimization.zero_hpz_partition_size")) not in (None, 0, 1):
        raise UnsupportedError(f"zero_optimization.zero_hpz_partition_size={value!r}", _UNTESTED, "1")
    if (value := _at(settings, "zero_optimization.mics_shard_size")) not in (None, -1, 0):
        raise UnsupportedError(f"zero_optimization.mics_shard_size={value!r}", _UNTESTED, "-1")
    if (value := settings.get("gradient_allreduce_op")) not in (None, "mean"):
        raise UnsupportedError(
            f"gradient_allreduce_op={value!r}", "the loss is scaled for the mean over all ranks", "'mean'"
        )
    theirs = settings.get("sequence_parallel_size")
    check_sizes(f"sequence_parallel_size={theirs!r}", theirs, size)


def check_sizes(what: str, theirs: int | None, size: int | None) -> None:
    """Compare how many ranks share a sequence, where the block and someone else say it.

    Args:
        what: the other one's words, with theirs in them.

    Raises:
        UnsupportedError: they differ.
    """
    if theirs is not None and size is not None and theirs != size:
        raise UnsupportedError(
            f"{what} beside dist_flash_attention.size={size}",
            "both say how many ranks share a sequence",
            "one of them, or the same number",
        )


def check_batch_sizes(settings: Mapping[str, Any], mesh: Mesh) -> None:
    """Refuse batch sizes that count the ranks of a sequence as if each had a sequence of its own.

    Raises:
        UnsupportedError: they do; what DeepSpeed would say of it explains nothing.
    """
    counts = [
        settings.get(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    if mesh.size == 1 or not all(isinstance(count, int) for count in counts):
        return
    whole, micro, accumulated = (int(count or 0) for count in counts)
    if whole == micro * accumulated * mesh.size * mesh.data_size:
        raise UnsupportedError(
            f"train_batch_size={whole} for {mesh.data_size} sequences at a time",
            f"it counts all {mesh.size * mesh.data_size} ranks, but {mesh.size} of them share a sequence",
            f"train_batch_size {whole // mesh.size}; under HF Trainer and accelerate, "
            f"ParallelismConfig(sp_size={mesh.size}, dp_replicate_size={mesh.data_size}, sp_backend='deepspeed')",
        )


def check_call(model: Any, *, mpu: Any, mesh_param: Any, training_data: Any) -> None:
    """Refuse arguments of `initialize` that contradict the block.

    Raises:
        UnsupportedError: names the argument.
    """
    import deepspeed
    from deepspeed.moe.layer import MoE

    if (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) < OLDEST:
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__}",
            "up to 0.19.4 it accumulates the gradients of micro-batches wrong at ZeRO 0 and 1 in float32, on one "
            "process already",
            "DeepSpeed 0.19.6 or later",
        )
    if mpu is not None and not isinstance(mpu, SequenceGroups):
        raise UnsupportedError(
            "mpu with dist_flash_attention",
            "with an mpu that knows of sequences DeepSpeed scales gradients by ZeRO stage: summed at 0, 1 and 2, "
            "averaged at 3",
            "no mpu (nor UlyssesSPAttentionHF.register_with_transformers, which makes one); the groups are made from "
            "dist_flash_attention.size",
        )
    if mesh_param is not None:
        raise UnsupportedError("mesh_param with dist_flash_attention", _KEYS["data_parallel_size"][0], "no mesh_param")
    if training_data is not None:
        raise UnsupportedError(
            "training_data with dist_flash_attention",
            "DeepSpeed's loader would give the ranks of one sequence different samples",
            "a loader of your own for rank mesh_of(engine).data_rank of .data_size, and shard_batch",
        )
    if any(isinstance(module, MoE) for module in model.modules()):
        raise UnsupportedError("DeepSpeed's MoE layers", _UNTESTED, "a model without them")


def check_engine(engine: Any, ranks: int) -> None:
    """Make sure that this version of DeepSpeed averages gradients over all ranks, which the loss is scaled for.

    Raises:
        UnsupportedError: it does not.
    """
    theirs = engine.sequence_parallel_size
    reduced = engine.seq_data_parallel_group
    reduced = ranks if reduced is None else reduced.size()
    if theirs != 1 or reduced != ranks:
        raise UnsupportedError(
            f"an engine that reduces gradients over {reduced} of {ranks} ranks, sequence parallelism of {theirs}",
            "groups for sequence parallelism were made in this process before, or this version of DeepSpeed differs",
            "one framework for sequence parallelism in a process; DeepSpeed 0.19.6 to 0.19.8",
        )


def _at(settings: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None if a part of it is missing."""
    value: Any = settings
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value
