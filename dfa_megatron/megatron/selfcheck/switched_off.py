"""Switch off features that a CPU cannot run or that depend on the number of ranks, and list each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dfa_megatron.megatron.selfcheck.known_flags import FUSED_OFF
from dfa_megatron.megatron.selfcheck.read_flags import Asked
from dfa_megatron.selfcheck.case import Reduction

LEARNING_RATE, ADAM_EPS, BUCKET = {"adam": 1e-2, "sgd": 1.0}, 1e-3, 4096
"""Steps that are large beside the rounding of weights. Adam divides by its eps where a gradient is small: with this one
rounding errors stay what they are. Buckets are so small that there are several."""

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
    "hidden_dropout": "random numbers differ between rank counts",
    "mtp_num_layers": "Megatron divides its loss by each rank's own tokens",
    "moe_aux_loss_coeff": "Megatron computes it from each rank's own tokens",
    "moe_z_loss_coeff": "Megatron computes it from each rank's own tokens",
    "moe_expert_capacity_factor": "which tokens are dropped depends on each rank's own tokens",
    "moe_input_jitter_eps": "random numbers differ between rank counts",
}
"""Fields with which Megatron's own result depends on how many ranks there are."""


def switch_off(asked: Asked, c: dict[str, Any], reduced: list[Reduction]) -> None:
    """Remove features from the config that cannot be compared on a CPU."""
    dtype = "bf16" if c.pop("bf16", False) else "fp16" if c.pop("fp16", False) else ""
    if dtype:
        reduced.append(Reduction("dtype", dtype, "float32" + (", no loss scale" if dtype == "fp16" else "")))
    if c.get("transformer_impl") != "local":
        reduced.append(Reduction("modules", "Transformer Engine's", "Megatron's own"))
    c["transformer_impl"] = "local"
    if fused := _fused(asked.off):
        reduced.append(Reduction("fused kernels", ", ".join(fused), "none"))
    for name, note in GPU_ONLY.items():
        if c.pop(name, None):
            reduced.append(Reduction(name, _said(asked.config[name]), "off" + (f": {note}" if note else "")))
    if c.get("hidden_dropout", 0.1):
        reduced.append(Reduction("hidden_dropout", str(c.get("hidden_dropout", 0.1)), f"0: {OFF['hidden_dropout']}"))
    c["hidden_dropout"] = 0.0
    for name, why in OFF.items():
        if name != "hidden_dropout" and c.pop(name, None):
            reduced.append(Reduction(name, _said(asked.config[name]), f"off: {why}"))


def steps(training: Mapping[str, Any], parallel: Mapping[str, Any], reduced: list[Reduction]) -> dict[str, Any]:
    """What the three steps of the optimizer do, and a line for each thing that they do otherwise."""
    t = training
    kept = (
        "adam_beta1", "adam_beta2", "clip_grad", "optimizer", "overlap_grad_reduce", "overlap_param_gather",
        "sgd_momentum", "use_distributed_optimizer", "weight_decay",
    )  # fmt: skip
    rate = LEARNING_RATE[t["optimizer"]]
    micro, many = min(2, t["micro_batch_size"]), 2 * (parallel["pp"] if parallel["vp"] else 1)
    if micro != t["micro_batch_size"]:
        reduced.append(Reduction("samples in a micro-batch", str(t["micro_batch_size"]), str(micro)))
    whole = f"global batch of {t['global_batch_size']}" if t["global_batch_size"] else "as the launch says"
    reduced.append(Reduction("micro-batches in a step", whole, str(many)))
    reduced.append(Reduction("data-parallel size", "as the launch says", "1"))
    given = "no learning rate" if t["lr"] is None else str(t["lr"])
    reduced.append(Reduction("learning rate", f"{given}, its schedule", f"{rate} in each step"))
    if t["optimizer"] == "adam":
        reduced.append(Reduction("adam_eps", str(t["adam_eps"]), str(ADAM_EPS)))
    narrow = "bf16" if t["grad_reduce_in_bf16"] else "fp16" if t["fp16"] else ""
    if narrow and not t["accumulate_allreduce_grads_in_fp32"]:
        reduced.append(Reduction("gradient reduction", narrow, "float32"))
    reduced.append(Reduction("gradient buckets", _said(t["ddp_bucket_size"] or "Megatron's size"), str(BUCKET)))
    return {
        **{name: t[name] for name in kept},
        "lr": rate,
        "adam_eps": ADAM_EPS,
        "bucket_size": BUCKET,
        "micro_batch_size": micro,
        "micro_batches": many,
    }


def _fused(off: Collection[str]) -> list[str]:
    """The fused kernels that stay on, of those that a script uses by itself."""
    gone = {FUSED_OFF[flag] for flag in off if flag in FUSED_OFF}
    return [name for name in dict.fromkeys(FUSED_OFF.values()) if name not in gone]


def _said(value: Any) -> str:
    return "on" if value is True else str(value)
