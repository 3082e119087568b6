"""Check the configuration of a model: Megatron's fields beside the options of this package."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.router import has_losses
from dfa_megatron.plan.degree import check_degree

_NO_FP8 = ("the block kernels compute in the input's 16- or 32-bit dtype", "fp8 for the linear layers only")
REFUSED = {
    "attention_dropout": (
        "the block kernels have no dropout inside the softmax",
        "--attention-dropout 0.0 (dropout elsewhere, --hidden-dropout, works)",
    ),
    "attn_logit_softcapping": (
        "Megatron-Core's attention does not cap scores, and neither does its replacement here",
        "a model without capped scores, or dist_flash_attn_func(softcap=...) in layers of your own",
    ),
    "batch_invariant_mode": ("the block kernels do not promise it", "leaving it off"),
    "cuda_graph_impl": (
        "messages between ranks inside a captured layer are not tested",
        "--cuda-graph-impl none",
    ),
    "experimental_attention_variant": (
        "this attention is softmax over all earlier keys, and the variant may be another function",
        "the model with Megatron's own attention, for dsa with --cp-comm-type allgather (Megatron-Core 0.19 and later)",
    ),
    "flash_decode": ("it is for inference", "training and evaluation without a key cache"),
    "fp8_dot_product_attention": _NO_FP8,
    "fp8_multi_head_attention": _NO_FP8,
    "hierarchical_context_parallel_sizes": (
        "the schedule runs over one flat context-parallel group",
        "no --hierarchical-context-parallel-sizes",
    ),
    "overlap_moe_expert_parallel_comm": (
        "it calls the parts of a layer directly, and so skips rematerialization and the order of the tokens",
        "no --overlap-moe-expert-parallel-comm",
    ),
    "use_kitchen_attention": ("this package computes attention with kernels of its own choice", "leaving it off"),
}
"""Fields that may not be set: the reason and the alternative."""

OVER_RANKS = {
    "moe_expert_capacity_factor": (
        "Megatron drops tokens by how many of a rank's own an expert gets, which depends on who holds which",
        "no --moe-expert-capacity-factor",
    ),
    "moe_router_load_balancing_type": (
        "Megatron balances the experts by sinkhorn over the tokens of each rank by itself",
        "--moe-router-load-balancing-type aux_loss",
    ),
    "mtp_hsm": (
        "it shifts hidden states over the ranks, and no gradient returns to the rank that a token came from",
        "no --mtp-hsm",
    ),
}
"""Fields that may not be set where several ranks share a sequence."""

RECOMPUTED = {
    "cpu_offloading": ("Megatron does not combine offloading with recomputation", "one of the two"),
    "fine_grained_activation_offloading": (
        "a layer is recomputed in the backward, where Megatron would offload what it needs next",
        "one of the two; --dfa-remat-offload moves what rematerialization keeps to the host",
    ),
    "num_microbatches_with_partial_activation_checkpoints": (
        "rematerialization recomputes the same layers in every micro-batch",
        "leaving it off, or checkpoint='none'",
    ),
}
"""Fields that may not be set where layers are recomputed without their attention."""

_HARMLESS = {"cuda_graph_impl": "none", "experimental_attention_variant": "gated_delta_net"}
"""The value of a refused field that may be set."""

KNOWN = frozenset({
    "apply_query_key_layer_scaling", "attention_dropout", "attention_softmax_in_fp32", "batch_invariant_mode", "bf16",
    "context_parallel_size", "deterministic_mode", "fp16", "init_method", "kv_channels", "log_max_attention_logit",
    "masked_softmax_fusion", "num_attention_heads", "num_query_groups", "params_dtype", "perform_initialization",
    "qk_clip", "sequence_parallel", "softmax_type", "tensor_model_parallel_size", "window_attn_skip_freq",
    "window_size",
})  # fmt: skip
"""What Megatron's own core attentions read of a config; ours uses it, refuses it, or it changes no number there."""

_READS = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that read an attribute of what the one before them loaded."""


def check_config(config: Any, options: MegatronConfig) -> None:
    """Refuse a configuration that would give wrong numbers without an error.

    Args:
        config: Megatron's TransformerConfig, or any object with its fields; a missing one counts as unset.
        options: of this package.
    """
    fields = vars(config)
    for name in REFUSED:
        if (value := fields.get(name)) and value != _HARMLESS.get(name):
            raise UnsupportedError(f"{name}={value!r}", *REFUSED[name])
    _check_known(config)
    if fields.get("deterministic_mode") and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic_mode=True without torch.use_deterministic_algorithms",
            "attention obeys PyTorch's switch, which Megatron's own --deterministic-mode turns on",
            "torch.use_deterministic_algorithms(True) before the model is built",
        )
    if (window := fields.get("window_size")) and window[1] > 0:
        raise UnsupportedError(
            f"window_size={window}",
            "it reaches past the token, and attention is causal (Megatron's own attentions differ on its meaning)",
            "--window-size with 0 at its right",
        )
    _check_recomputation(fields, options)
    _check_tiles(fields, options)
    ranks = fields.get("context_parallel_size", 1)
    if ranks > 1:
        _check_over_ranks(fields, options)
    heads = (fields.get("num_attention_heads") or 0) // fields.get("tensor_model_parallel_size", 1)
    check_degree(options.fixed_degree, ranks, heads)


def check_uneven(config: Any, counts: list[int], tokens: int, rank: int) -> None:
    """Refuse a row that the ranks do not divide where a part of Megatron takes equal parts only.

    counts: tokens of every rank, as `shard_batch` cuts the row. tokens: those that this rank brings.
    """
    fields, total = vars(config), sum(counts)
    tp = fields["tensor_model_parallel_size"] if fields["sequence_parallel"] else 1
    equal = f"a row of {total} tokens on {len(counts)} context-parallel ranks"
    divides = f"a row whose length is a multiple of {len(counts) * tp}"
    if tokens != counts[rank]:
        what = f"{equal}, {tokens} of them on rank {rank}"
        raise UnsupportedError(what, f"the parts are {counts}", "a batch from shard_batch")
    if any(count % tp for count in counts):
        what = f"{equal} with sequence_parallel"
        raise UnsupportedError(what, f"{tp} ranks share each of the parts {counts}", divides)
    if fields["pipeline_model_parallel_size"] > 1 and not fields.get("variable_seq_lengths"):
        raise UnsupportedError(
            f"{equal} in a pipeline", "its stages expect equal parts", f"--variable-seq-lengths, or {divides}"
        )
    experts = fields.get("num_moe_experts")
    if experts and (has_losses(config) or fields["expert_model_parallel_size"] > 1):
        raise UnsupportedError(
            f"{equal} with a router's losses or expert parallelism", "Megatron counts equal parts there", divides
        )


def _check_known(config: Any) -> None:
    """Refuse a field of a newer Megatron that its own attention reads: it may be a cap, a sink or a scale."""
    for name in _read_by_megatrons() - KNOWN:
        value = getattr(config, name, None)
        if value and value != getattr(type(config), name, None):
            raise UnsupportedError(
                f"{name}={value!r}",
                "Megatron's own attention reads it, and this package does not know its meaning",
                "leaving it unset, or a Megatron-Core that this package was tested with",
            )


@functools.cache
def _read_by_megatrons() -> frozenset[str]:
    """Return the fields that Megatron's core attention reads of a config, by its code: a release may lack sources."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    found: list[Any] = [DotProductAttention]
    with contextlib.suppress(ImportError):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        found.append(TEDotProductAttention)
    methods = [x for each in found if isinstance(each, type) for x in vars(each).values()]  # a mock without its package
    codes = [inspect.unwrap(x).__code__ for x in methods if inspect.isfunction(x)]
    for code in codes:
        codes += [x for x in code.co_consts if inspect.iscode(x)]
    steps = (pair for code in codes for pair in pairwise(dis.get_instructions(code)))
    return frozenset(step.argval for of, step in steps if of.argval == "config" and step.opname in _READS)


def recomputes(fields: dict[str, Any], options: MegatronConfig) -> bool:
    """Return whether layers are recomputed without their attention."""
    full = fields.get("recompute_granularity") == "full" and options.saves_attention
    return full or options.checkpoint == "remat"


def _check_recomputation(fields: dict[str, Any], options: MegatronConfig) -> None:
    selective = fields.get("recompute_granularity") == "selective"
    if selective and "core_attn" in (fields.get("recompute_modules") or ()):
        raise UnsupportedError(
            "selective recomputation of core_attn",
            "it would run the distributed attention and its messages a second time",
            "--recompute-granularity full (attention is saved, the rest recomputed), or selective without core_attn",
        )
    if selective and options.checkpoint == "remat":
        raise UnsupportedError(
            "checkpoint='remat' together with selective recomputation",
            "a layer would be recomputed inside its own recomputation",
            "--recompute-granularity full, or checkpoint='auto'",
        )
    if options.checkpoint == "full" and fields.get("recompute_granularity") != "full":
        raise UnsupportedError(
            "checkpoint='full' in Megatron",
            "its own flags say which layers are recomputed with their attention",
            "--recompute-granularity full beside it, or checkpoint='remat'",
        )
    if options.remat_offload and not recomputes(fields, options):
        raise UnsupportedError(
            "remat_offload without --recompute-granularity full",
            "without rematerialization there is nothing to offload",
            "that flag, or checkpoint='remat'",
        )
    for name in RECOMPUTED if recomputes(fields, options) else ():
        if fields.get(name):
            raise UnsupportedError(f"{name} together with rematerialization", *RECOMPUTED[name])
    if fields.get("fine_grained_activation_offloading") and "core_attn" in (fields.get("offload_modules") or ()):
        raise UnsupportedError(
            "offloading core_attn",
            "Megatron frees q, k and v once they are copied, which was not tried beside messages that read them",
            "--offload-modules without core_attn, or --dfa-remat-offload with --recompute-granularity full",
        )


def _check_tiles(fields: dict[str, Any], options: MegatronConfig) -> None:
    if options.loss_tile != "off" and fields.get("defer_embedding_wgrad_compute"):
        raise UnsupportedError(
            "loss_tile together with defer_embedding_wgrad_compute",
            "Megatron would keep the gradients of all logits until the pipeline is empty",
            "one of the two",
        )


def _check_over_ranks(fields: dict[str, Any], options: MegatronConfig) -> None:
    for name in OVER_RANKS:
        value = fields.get(name)
        if value and (name != "moe_router_load_balancing_type" or "sinkhorn" in value):
            raise UnsupportedError(f"{name}={value!r} over several context-parallel ranks", *OVER_RANKS[name])
    if fields.get("moe_enable_routing_replay") and options.data_layout == "boundary":
        raise UnsupportedError(
            "moe_enable_routing_replay in data_layout='boundary'",
            "the routers see the tokens in another order than the caller, whose indices they would take for their own",
            "data_layout='contiguous' with batches of shard_batch, or 'zigzag'",
        )
    delta = fields.get("experimental_attention_variant") == "gated_delta_net" or fields.get("linear_attention_freq")
    if delta and options.data_layout == "zigzag":
        raise UnsupportedError(
            "gated delta net among the layers of a GPT model in layout 'zigzag'",
            "these layers need tokens in order",
            "--dfa-data-layout contiguous or boundary",
        )
