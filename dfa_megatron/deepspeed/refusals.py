"""Every request that the integration with DeepSpeed refuses: it contradicts the block, or no test compared it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfa_megatron.refusals import Refusal, Stage, stated

_UNTESTED = "no test compares its gradients, beside distributed attention, with those of one process"
_MESH = "DeepSpeed's mesh does not reduce gradients over the ranks of a sequence at ZeRO 0, 1 and 2"
_LOADER = "DeepSpeed's loader would give the ranks of one sequence different samples"
_ONE_TRANSFORMERS = "a transformers causal language model, or no selfcheck"


def _at(settings: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, None if a part of it is missing."""
    value: Any = settings
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _key(path: str, why: str, instead: str, example: Any = True, allowed: Any = None) -> Refusal:
    """Return the row of a key, by its path in the JSON, that must be absent, false, 0, empty or `allowed`."""
    first, *rest = path.split(".")
    for name in reversed(rest):
        example = {name: example}
    shown = first + "".join(f"[{name}]" for name in rest)
    what = f"{path}={{{shown}!r}} with dist_flash_attention"
    return Refusal(lambda a: _at(vars(a), path) and _at(vars(a), path) != allowed, what, why, instead, {first: example})


BLOCK = Stage(
    "DeepSpeed: when the block is read",
    (
        stated(
            "no_block",
            "dist_flash_attention={no_block}",
            "it must be a block",
            '{{"enabled": true, "size": 8}}',
            "True",
        ),
        stated(
            "unknown_key",
            "the key dist_flash_attention.{unknown_key}",
            "no option has that name",
            "{nearest}",
            "sizes",
            nearest="perhaps 'size'; one of enabled, size, ...",
        ),
        stated(
            "wrong_size",
            "dist_flash_attention.size={wrong_size}",
            "it must be a number of ranks",
            "for example 8",
            "'8'",
        ),
        stated(
            "no_bool", "dist_flash_attention.{no_bool}", "it must be of type bool", "true or false", "enabled='true'"
        ),
    ),
)

SETTINGS = Stage(
    "DeepSpeed: when its configuration is read",
    (
        _key("data_parallel_size", _MESH, "dist_flash_attention.size alone", 2),
        _key("sparse_gradients", _UNTESTED, "dense gradients"),
        _key("tensor_parallel.autotp_size", _UNTESTED, "tensor_parallel.autotp_size 0", 2),
        _key("hybrid_engine.enabled", _UNTESTED, "hybrid_engine.enabled false"),
        _key(
            "torch_autocast.enabled",
            "it sums the gradients of a sequence's ranks in the autocast dtype, and no test compares them with those "
            "of one process",
            "bf16.enabled, whose gradients are summed in float32",
        ),
        _key("compile.deepcompile", _UNTESTED, "compile.deepcompile false"),
        _key("compile.passes", _UNTESTED, "no compile passes; autosp is another sequence parallelism", ["autosp"]),
        _key("zero_optimization.zero_quantized_weights", _UNTESTED, "false"),
        _key("zero_optimization.zero_quantized_nontrainable_weights", _UNTESTED, "false"),
        _key("zero_optimization.zero_quantized_gradients", _UNTESTED, "false"),
        _key(
            "activation_checkpointing.partition_activations",
            "it divides activations among ranks that hold the same ones, but the ranks of a sequence hold different "
            "tokens",
            "partition_activations false; cpu_checkpointing keeps them on the host",
        ),
        _key("zero_optimization.zero_hpz_partition_size", _UNTESTED, "1", 2, allowed=1),
        _key("zero_optimization.mics_shard_size", _UNTESTED, "-1", 2, allowed=-1),
        _key(
            "gradient_allreduce_op", "the loss is scaled for the mean over all ranks", "'mean'", "sum", allowed="mean"
        ),
        Refusal(
            lambda a: a.theirs is not None and a.size is not None and a.theirs != a.size,
            "{source}={theirs} beside dist_flash_attention.size={size}",
            "both give the number of ranks that share a sequence",
            "one of them, or the same number",
            {"source": "sequence_parallel_size", "theirs": 4, "size": 2},
        ),
        Refusal(
            lambda a: a.cpu_checkpointing and a.dfa_checkpoint == "none",
            "activation_checkpointing.cpu_checkpointing with dist_flash_attention.checkpoint 'none'",
            "no layer is checkpointed, so there is nothing to keep on the host",
            "checkpoint 'remat' or 'full'",
            {"cpu_checkpointing": True},
        ),
        Refusal(
            lambda a: a.cpu_checkpointing and a.on_cpu,
            "activation_checkpointing.cpu_checkpointing on a CPU",
            "inputs are on the host already",
            "false",
            {"cpu_checkpointing": True, "dfa_checkpoint": "full", "on_cpu": True},
        ),
        stated(
            "counts_all_ranks",
            "train_batch_size={counts_all_ranks} for {data_size} sequences at a time",
            "it counts all {ranks} ranks, but {size} of them share a sequence",
            "train_batch_size {right}; under HF Trainer and accelerate, ParallelismConfig(sp_size={size}, "
            "dp_replicate_size={data_size}, sp_backend='deepspeed')",
            8,
            data_size=2,
            ranks=8,
            size=4,
            right=2,
        ),
    ),
)

CALL = Stage(
    "DeepSpeed: when initialize is called",
    (
        stated(
            "old_version",
            "DeepSpeed {old_version}",
            "up to 0.19.4 it accumulates the gradients of micro-batches wrong at ZeRO 0 and 1 in float32, on one "
            "process already",
            "DeepSpeed 0.19.6 or later",
            "0.19.4",
        ),
        stated(
            "mpu",
            "mpu with dist_flash_attention",
            "with an mpu that knows of sequences DeepSpeed scales gradients by ZeRO stage: summed at 0, 1 and 2, "
            "averaged at 3",
            "no mpu (nor UlyssesSPAttentionHF.register_with_transformers, which makes one); the groups are made from "
            "dist_flash_attention.size",
        ),
        stated("mesh_param", "mesh_param with dist_flash_attention", _MESH, "no mesh_param"),
        stated(
            "training_data",
            "training_data with dist_flash_attention",
            _LOADER,
            "a loader of your own for rank mesh_of(engine).data_rank of .data_size, and shard_batch",
        ),
        stated("moe_layers", "DeepSpeed's MoE layers", _UNTESTED, "a model without them"),
        stated(
            "selfcheck_of",
            "dist_flash_attention.selfcheck for {selfcheck_of}",
            "the check makes the model small, and can do that for transformers models only",
            _ONE_TRANSFORMERS,
            "a pipeline",
        ),
        stated(
            "own_checkpoint",
            "dist_flash_attention.checkpoint={own_checkpoint!r} for a model of your own",
            "its layers are not known",
            "checkpoint 'none', and dfa_megatron.deepspeed.checkpoint or dfa_megatron.remat.context_fn in the model",
            "full",
        ),
        stated(
            "other_ranks",
            "a DistFlashAttention over ranks {other_ranks}",
            "the sequences of this engine are on ranks {wanted}",
            "DistFlashAttention without a group, or the block's size for its group",
            [0],
            wanted=[0, 1],
        ),
        stated(
            "uneven_stages",
            "{uneven_stages} stages on {ranks} ranks",
            "every stage has the same number of ranks",
            "a number that divides the ranks",
            3,
            ranks=4,
        ),
        stated(
            "uneven_size",
            "a sequence on {uneven_size} of {ranks} ranks",
            "every rank belongs to one group of that size",
            "size {divisors}",
            3,
            ranks=4,
            divisors="1, 2, 4",
        ),
        stated(
            "axes",
            "a pipeline with the axes {axes}",
            "sequences lie across the data-parallel ranks of a stage, which must be consecutive",
            "PipelineModule(num_stages=...), or a topology with the axes pipe, data",
            "data, pipe",
        ),
        stated(
            "pipeline_on_host",
            "activation_checkpointing.cpu_checkpointing for a pipeline",
            "no test compares it with one process",
            "dist_flash_attention.remat_offload, which keeps attention's output and lse on the host",
        ),
    ),
)

ENGINE = Stage(
    "DeepSpeed: when an engine is made, and afterwards",
    (
        stated(
            "reduced_over",
            "an engine that reduces gradients over {reduced_over} of {ranks} ranks, sequence parallelism of {theirs}",
            "groups for sequence parallelism were made in this process before, or this version of DeepSpeed differs",
            "one framework for sequence parallelism in a process; DeepSpeed 0.19.6 to 0.19.8",
            "2",
            ranks=4,
            theirs=2,
        ),
        stated(
            "compile",
            "engine.compile with distributed attention",
            "transformers then asks for masks that are not planned, and no test compares ZeRO's gathers in it",
            "the engine without compile",
        ),
        stated(
            "deepspeed_io",
            "engine.deepspeed_io with distributed attention",
            _LOADER,
            "a DataLoader of your own whose sampler takes data_rank and data_size of mesh_of(engine), and shard_batch",
        ),
        stated(
            "no_mesh",
            "mesh_of an engine without distributed attention",
            "the block dist_flash_attention was missing or not enabled",
            "dfa_megatron.deepspeed.initialize with the block",
        ),
    ),
)

SELFCHECK = Stage(
    "DeepSpeed: when a self-check is made",
    (
        stated(
            "no_json",
            "{path}",
            "it is no JSON: {no_json}",
            "DeepSpeed's configuration",
            "Expecting value",
            path="ds.json",
        ),
        stated(
            "no_block",
            "{no_block} in a self-check",
            "it has no enabled block dist_flash_attention",
            '"dist_flash_attention": {{"enabled": true, ...}}',
            "ds.json",
        ),
        stated(
            "no_size",
            "{no_size} without dist_flash_attention.size",
            "the number of ranks that share a sequence is unknown",
            "--ranks",
            "ds.json",
        ),
        stated(
            "optimizer",
            "optimizer.type {optimizer!r} in a self-check",
            "it was not tried",
            "Adam, AdamW or SGD",
            "lamb",
        ),
    ),
)

STAGES = (CALL, BLOCK, SETTINGS, ENGINE, SELFCHECK)


def check_settings(settings: Mapping[str, Any], size: int | None) -> None:
    """Refuse keys of DeepSpeed's JSON that contradict the block.

    Raises:
        UnsupportedError: names the key.
    """
    SETTINGS.check(settings)
    check_sizes("sequence_parallel_size", settings.get("sequence_parallel_size"), size)


def check_sizes(source: str, theirs: int | None, size: int | None) -> None:
    """Compare the number of ranks that share a sequence in the block with the number in another place.

    Raises:
        UnsupportedError: they differ.
    """
    SETTINGS.check(source=source, theirs=theirs, size=size)
