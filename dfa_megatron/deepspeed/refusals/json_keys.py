"""Keys of DeepSpeed's JSON, and of the block in it, that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfa_megatron.refusals import Refusal, Stage, stated

UNTESTED = "no test compares its gradients, beside distributed attention, with those of one process"
MESH = "DeepSpeed's mesh does not reduce gradients over the ranks of a sequence at ZeRO 0, 1 and 2"


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
            "misspelled",
            "the key {misspelled} in DeepSpeed's JSON",
            "DeepSpeed would ignore it, and what it asks for",
            "dist_flash_attention, once",
            "dist_flash_attn",
        ),
        stated(
            "differing",
            "{differing}",
            "every rank must ask for the same groups and steps, or it would wait for others for ever",
            "one JSON for all ranks",
            'dist_flash_attention={"size": 4} on rank 0, dist_flash_attention={"size": 2} on rank 1',
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
        _key("data_parallel_size", MESH, "dist_flash_attention.size alone", 2),
        _key("sparse_gradients", UNTESTED, "dense gradients"),
        _key("tensor_parallel.autotp_size", UNTESTED, "tensor_parallel.autotp_size 0", 2),
        _key("hybrid_engine.enabled", UNTESTED, "hybrid_engine.enabled false"),
        _key(
            "torch_autocast.enabled",
            "it sums the gradients of a sequence's ranks in the autocast dtype, and no test compares them with those "
            "of one process",
            "bf16.enabled, whose gradients are summed in float32",
        ),
        _key("compile.deepcompile", UNTESTED, "compile.deepcompile false"),
        _key("compile.passes", UNTESTED, "no compile passes; autosp is another sequence parallelism", ["autosp"]),
        _key("zero_optimization.zero_quantized_weights", UNTESTED, "false"),
        _key("zero_optimization.zero_quantized_nontrainable_weights", UNTESTED, "false"),
        _key("zero_optimization.zero_quantized_gradients", UNTESTED, "false"),
        _key(
            "activation_checkpointing.partition_activations",
            "it divides activations among ranks that hold the same ones, but the ranks of a sequence hold different "
            "tokens",
            "partition_activations false; cpu_checkpointing keeps them on the host",
        ),
        _key("zero_optimization.zero_hpz_partition_size", UNTESTED, "1", 2, allowed=1),
        _key("zero_optimization.mics_shard_size", UNTESTED, "-1", 2, allowed=-1),
        _key(
            "gradient_allreduce_op", "the loss is scaled for the mean over all ranks", "'mean'", "sum", allowed="mean"
        ),
        Refusal(
            lambda a: a.theirs is not None and type(a.theirs) is not int,
            "{source}={theirs!r}",
            "it must be a number of ranks",
            "for example 8",
            {"source": "sequence_parallel_size", "theirs": "auto"},
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
        Refusal(
            lambda a: a.cpu_checkpointing and a.dfa_remat_offload,
            "activation_checkpointing.cpu_checkpointing with dist_flash_attention.remat_offload",
            "both keep a layer's input in host memory",
            "remat_offload alone",
            {"cpu_checkpointing": True, "dfa_checkpoint": "remat", "dfa_remat_offload": True},
        ),
        stated(
            "automatic",
            "{automatic}='auto'",
            "only HF Trainer and accelerate fill it in",
            "a number, or HF Trainer with dfa_megatron.deepspeed.install()",
            "train_micro_batch_size_per_gpu",
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
