"""Calls of DeepSpeed, its engines and self-checks that are refused."""

from __future__ import annotations

from dfa_megatron.deepspeed.refusals.json_keys import MESH, UNTESTED
from dfa_megatron.refusals import Stage, stated

_LOADER = "DeepSpeed's loader would give the ranks of one sequence different samples"
_ONE_TRANSFORMERS = "a transformers causal language model, or no selfcheck"

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
        stated("mesh_param", "mesh_param with dist_flash_attention", MESH, "no mesh_param"),
        stated(
            "training_data",
            "training_data with dist_flash_attention",
            _LOADER,
            "a loader of your own for rank mesh_of(engine).data_rank of .data_size, and shard_batch",
        ),
        stated("moe_layers", "DeepSpeed's MoE layers", UNTESTED, "a model without them"),
        stated(
            "prove_of",
            "dist_flash_attention.prove for {prove_of}",
            "the reference is a transformers model with its former attention",
            "a transformers causal language model, or no prove",
            "a pipeline",
        ),
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
            "own_tile",
            "dist_flash_attention.{own_tile} for a model of your own or a pipeline",
            "its head and its layers are not known",
            "'off', and dfa_megatron.deepspeed.tiled_loss or dfa_megatron.remat.by_tiles in the model",
            "loss_tile=4096",
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
        stated(
            "clipped_stages",
            "gradient_clipping={clipped_stages} for a pipeline at ZeRO 0 (1.0 where the key is missing)",
            "DeepSpeed scales the gradients of all stages by the norm of the first one's",
            "zero_optimization.stage 1, or gradient_clipping 0",
            1.0,
        ),
        stated(
            "gloo_groups",
            "HF Trainer with {gloo_groups} sequences at a time over gloo",
            "in the backward of its loss PyTorch looks for the first ranks of all in every group",
            "nccl; sp_size of all ranks; or a loop of your own around accelerate, with dfa_megatron.deepspeed.loss",
            2,
        ),
        stated(
            "split_batches",
            "split_batches with ParallelismConfig(sp_size={split_batches})",
            "a step would take the sequences of a batch divided by sp_size, and schedules would end too early",
            "split_batches=False",
            2,
        ),
    ),
)

ENGINE = Stage(
    "DeepSpeed: when an engine is made, and afterwards",
    (
        stated(
            "proved_within",
            "prove after {proved_within} of a step's {accumulated} micro-batches",
            "ZeRO holds their gradients, which it would add to those of the proof",
            "prove before the first step, or between two",
            1,
            accumulated=2,
        ),
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
