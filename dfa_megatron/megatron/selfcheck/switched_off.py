"""Switch off features that a CPU cannot run or that depend on the number of ranks, and list each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dfa_megatron.megatron.selfcheck.known_flags import FUSED_OFF
from dfa_megatron.megatron.selfcheck.read_flags import Asked
from dfa_megatron.selfcheck.case import Reductions
from dfa_megatron.selfcheck.train import ADAM_EPS

LEARNING_RATE, BUCKET = {"adam": 1e-2, "sgd": 1.0}, 4096
"""Steps that are large beside the rounding of weights, and buckets small enough for several."""

GPU_ONLY: dict[str, str] = {
    "apply_rope_fusion": "",
    "bias_activation_fusion": "",
    "bias_dropout_fusion": "",
    "cpu_offloading": "",
    "cross_entropy_loss_fusion": "",
    "disable_parameter_transpose_cache": "",
    "fp4": "its rounding is not seen",
    "fp8": "its rounding is not seen",
    "gradient_accumulation_fusion": "",
    "masked_softmax_fusion": "",
    "memory_efficient_layer_norm": "",
    "moe_grouped_gemm": "one product after another",
    "moe_permute_fusion": "",
    "moe_router_fusion": "",
    "persist_layer_norm": "",
    "tp_comm_overlap": "",
    "use_te_rng_tracker": "",
}
"""Fields of TransformerConfig that need a GPU. fp8 and fp4 change what is computed; the others only how."""

OFF: dict[str, str] = {
    "mtp_num_layers": "Megatron divides its loss by each rank's own tokens",
    "moe_aux_loss_coeff": "Megatron computes it from each rank's own tokens",
    "moe_z_loss_coeff": "Megatron computes it from each rank's own tokens",
    "moe_expert_capacity_factor": "which tokens are dropped depends on each rank's own tokens",
    "moe_input_jitter_eps": "random numbers differ between rank counts",
}
"""Fields with which Megatron's own result depends on how many ranks there are."""


def switch_off(asked: Asked, c: dict[str, Any], reduced: Reductions) -> None:
    """Remove features from the config that cannot be compared on a CPU."""
    dtype = "bf16" if c.pop("bf16", False) else "fp16" if c.pop("fp16", False) else ""
    if dtype:
        reduced.note("dtype", dtype, "float32" + (", no loss scale" if dtype == "fp16" else ""))
    if c.get("transformer_impl") != "local":
        reduced.note("modules", "Transformer Engine's", "Megatron's own")
    c["transformer_impl"] = "local"
    if fused := _fused(asked.off):
        reduced.note("fused kernels", ", ".join(fused), "none")
    for name, note in GPU_ONLY.items():
        if value := c.pop(name, None):
            reduced.note(name, value, "off" + (f": {note}" if note else ""))
    if dropout := c.get("hidden_dropout", 0.1):
        reduced.note("hidden_dropout", dropout, "0: random numbers differ between rank counts")
    c["hidden_dropout"] = 0.0
    for name, why in OFF.items():
        if value := c.pop(name, None):
            reduced.note(name, value, f"off: {why}")


def steps(training: Mapping[str, Any], parallel: Mapping[str, Any], reduced: Reductions) -> dict[str, Any]:
    """Return the settings of the three steps, and list each that is not the user's."""
    t = training
    kept = (
        "adam_beta1", "adam_beta2", "clip_grad", "optimizer", "overlap_grad_reduce", "sgd_momentum",
        "use_distributed_optimizer", "weight_decay",
    )  # fmt: skip
    rate = LEARNING_RATE[t["optimizer"]]
    micro, many = min(2, t["micro_batch_size"]), 2 * (parallel["pp"] if parallel["vp"] else 1)
    reduced.note("samples in a micro-batch", t["micro_batch_size"], micro)
    whole = f"global batch of {t['global_batch_size']}" if t["global_batch_size"] else "as the launch says"
    reduced.note("micro-batches in a step", whole, many)
    reduced.note("data-parallel size", "as the launch says", 1)
    given = "no learning rate" if t["lr"] is None else t["lr"]
    reduced.note("learning rate", f"{given}, its schedule", f"{rate} in each step")
    if t["optimizer"] == "adam":
        reduced.note("adam_eps", t["adam_eps"], ADAM_EPS)
    narrow = "bf16" if t["grad_reduce_in_bf16"] else "fp16" if t["fp16"] else ""
    if narrow and not t["accumulate_allreduce_grads_in_fp32"]:
        reduced.note("gradient reduction", narrow, "float32")
    reduced.note("gradient buckets", t["ddp_bucket_size"] or "Megatron's size", BUCKET)
    return {
        **{name: t[name] for name in kept},
        "overlap_param_gather": t["use_distributed_optimizer"] and t["overlap_param_gather"],
        "lr": rate,
        "adam_eps": ADAM_EPS,
        "bucket_size": BUCKET,
        "micro_batch_size": micro,
        "micro_batches": many,
    }


def _fused(off: Collection[str]) -> list[str]:
    """Name the fused kernels that a script uses and these flags leave on."""
    gone = {FUSED_OFF[flag] for flag in off if flag in FUSED_OFF}
    return [name for name in dict.fromkeys(FUSED_OFF.values()) if name not in gone]
