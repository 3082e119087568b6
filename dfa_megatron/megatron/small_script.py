"""A Megatron script's flags, read by Megatron's own parser, with a small model, for `dfa-megatron prove megatron`."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.cpu.mixers import shortest, stack_spec, use_stand_ins, with_delta_nets
from dfa_megatron.megatron.cpu.stand_in import use_cpu
from dfa_megatron.megatron.proved_job import prove
from dfa_megatron.megatron.script.dfa_flags import options_of
from dfa_megatron.megatron.script.launcher import prepare
from dfa_megatron.megatron.spec import distribute_attention
from dfa_megatron.proving import Proof
from dfa_megatron.proving.job import TOKENS
from dfa_megatron.proving.small_job import (
    EXPERTS,
    FFN,
    HEAD,
    HIDDEN,
    VOCABULARY,
    Reductions,
    SmallJob,
    enlarge,
    fewer,
    fewest_groups,
    on_cpu,
    window_of,
)

_SIZES = {"pp": "pipeline_model_parallel_size", "tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}
_PATTERNS = ("window_attn_skip_freq", "moe_layer_freq", "no_rope_freq", "linear_attention_freq")
_MOST = {
    HEAD: (
        "kv_channels", "qk_pos_emb_head_dim", "mamba_state_dim", "mamba_head_dim", "linear_key_head_dim",
        "linear_value_head_dim",
    ),
    2 * HEAD: ("qk_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"),
    HIDDEN: ("hidden_size",),
    FFN: ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    VOCABULARY: ("vocab_size", "padded_vocab_size"),
}  # fmt: skip
"""Sizes, by the largest that they have."""
_INSTEAD: dict[Any, tuple[str, ...]] = {
    False: (
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "apply_rope_fusion",
        "async_tensor_model_parallel_allreduce", "bf16", "bias_dropout_fusion", "bias_gelu_fusion",
        "bias_swiglu_fusion", "cpu_offloading", "cross_entropy_loss_fusion", "fp16", "grad_reduce_in_bf16",
        "gradient_accumulation_fusion", "masked_softmax_fusion", "moe_grouped_gemm", "moe_permute_fusion",
        "moe_router_fusion", "overlap_grad_reduce", "overlap_param_gather", "te_rng_tracker", "tp_comm_overlap",
        "use_checkpoint_args", "use_megatron_fsdp", "use_torch_fsdp2",
    ),
    None: (
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "fp4", "fp8", "global_batch_size",
        "load", "moe_expert_capacity_factor", "moe_input_jitter_eps", "pipeline_model_parallel_layout",
        "rampup_batch_size", "save", "tensorboard_dir", "wandb_project",
    ),
    True: ("no_persist_layer_norm", "use_cpu_initialization"),
    "NullTokenizer": ("tokenizer_type",),
    "allgather": ("moe_token_dispatcher_type",),
    "gloo": ("distributed_backend",),
    "local": ("transformer_impl",),
}  # fmt: skip
"""What a CPU runs in place of features for GPUs, of files, and of what depends on the number of ranks by itself."""


def small_job(words: Sequence[str]) -> SmallJob:
    """Read the flags of a script.

    Raises:
        UnsupportedError: a flag is refused, or Megatron's parser is not there.
        SystemExit: Megatron's parser does not take a flag.
    """
    prepare(words)
    try:
        importlib.import_module("megatron.training.argument_utils")
        parse_args: Any = importlib.import_module("megatron.training.arguments").parse_args
    except ImportError as error:
        raise UnsupportedError(
            "prove megatron without Megatron's own parser and builders",
            str(error),
            "a wheel of megatron-core from 0.19 on, or a clone on PYTHONPATH",
        ) from error
    before, sys.argv, reduced = sys.argv, ["prove", *words], Reductions()
    try:
        args = parse_args()
    finally:
        sys.argv = before
    ranks = _shrink(args, reduced, {word.partition("=")[0] for word in words})
    return SmallJob(ranks, reduced, lambda: _prove(args))


def _shrink(args: Any, reduced: Reductions, given: set[str]) -> int:
    """Change the arguments, note what differs from the flags that were given, and return the number of ranks."""
    own = getattr(args, "heterogeneous_layers_config_path", None)
    if own or not (args.num_layers or args.hybrid_layer_pattern):
        raise UnsupportedError(
            "prove megatron without --num-layers or --hybrid-layer-pattern",
            "other layers cannot be made small",
            "--dfa-prove in the job itself",
        )
    options = options_of(args)
    options = options.replace(**on_cpu(options, reduced))
    for name in ("kernel", "transport", "remat_offload"):
        if hasattr(args, f"dfa_{name}"):
            setattr(args, f"dfa_{name}", getattr(options, name))

    def put(name: str, value: Any) -> None:
        if hasattr(args, name):
            flag = "--" + name.replace("_", "-")
            if flag in given:
                reduced.note(flag, getattr(args, name), value)
            setattr(args, name, value)

    sizes = fewer({name: getattr(args, flag) for name, flag in _SIZES.items()})
    for name, flag in _SIZES.items():
        put(flag, sizes[name])
    put("expert_model_parallel_size", math.gcd(args.expert_model_parallel_size, sizes["cp"]))
    for value, names in _INSTEAD.items():
        for name in names:
            put(name, value)
    put("micro_batch_size", 1)
    put("make_vocab_size_divisible_by", 1)
    _heads(args, put, options.fixed_degree, sizes["tp"])
    for most, names in _MOST.items():
        for name in names:
            if isinstance(asked := getattr(args, name, None), int):
                put(name, min(asked, most))
    if args.num_experts:
        put("num_experts", min(args.num_experts, max(EXPERTS, args.moe_router_topk)))
    if args.window_size and args.window_size[0] > 0:
        put("window_size", (window_of(args.window_size[0], args.seq_length, sizes["cp"]), args.window_size[1]))
    _layers(args, put, sizes["pp"])
    length = min(args.seq_length or 1 << 12, 1 << 12)
    put("seq_length", length)
    put("max_position_embeddings", max(length, 2 * TOKENS * sizes["cp"]))
    return math.prod(sizes.values())


def _heads(args: Any, put: Any, degree: int, tp: int) -> None:
    """Take as few key/value heads as the parallel sizes need, at the ratio of the user's."""
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    ratio = heads // groups
    few = groups if groups % tp or (degree > 1 and groups // tp < degree) else fewest_groups(groups, ratio, degree, tp)
    put("kv_channels", args.kv_channels or args.hidden_size // heads)
    put("ffn_hidden_size", args.ffn_hidden_size or 4 * args.hidden_size)
    put("num_attention_heads", few * ratio)
    if args.group_query_attention:
        put("num_query_groups", few)
    keys = getattr(args, "linear_num_key_heads", None)
    if keys:
        put("linear_num_value_heads", args.linear_num_value_heads * max(2, tp) // keys)
        put("linear_num_key_heads", max(2, tp))
    groups = getattr(args, "mamba_num_groups", None) or 8
    put("mamba_num_groups", min(groups, max(2, tp)))
    if getattr(args, "mamba_num_heads", None):
        put("mamba_num_heads", 2 * min(groups, max(2, tp)))


def _layers(args: Any, put: Any, stages: int) -> None:
    """Keep enough for every stage of the pipeline and for each kind of layer in the patterns."""
    if args.hybrid_layer_pattern:
        pattern = args.hybrid_layer_pattern.partition("/")[0].replace("|", "")
        put("hybrid_layer_pattern", shortest(pattern) if stages == 1 else pattern[: 2 * stages])
        put("num_layers", None)
        return
    virtual = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
    if virtual and stages > 1:
        put("num_layers_per_virtual_pipeline_stage", None)
        put("num_virtual_stages_per_pipeline_rank", 2)
    chunks, needed = stages * (2 if virtual and stages > 1 else 1), 2
    for pattern in (getattr(args, name, None) for name in _PATTERNS):
        if isinstance(pattern, int):
            needed = max(needed, pattern)
        elif pattern:
            needed = max(needed, 1 + max(pattern.index(kind) for kind in set(pattern)))
    few = min(args.num_layers, chunks * math.ceil(max(needed, chunks) / chunks))
    for name in _PATTERNS:
        if isinstance(pattern := getattr(args, name, None), list):
            put(name, pattern[:few])
    put("num_layers", few)


def _prove(args: Any) -> Proof:
    """Build the model as Megatron's scripts do, and prove it."""
    use_cpu()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, arguments, global_vars, training

    hybrid = args.hybrid_layer_pattern is not None
    if hybrid or getattr(args, "linear_attention_freq", None):
        use_stand_ins()
        args.spec = None
    device = SimpleNamespace(major=9, minor=0, name="none")
    vars(torch.cuda).update(get_device_capability=lambda *_: (9, 0), get_device_properties=lambda *_: device)
    try:
        arguments.validate_args(args)
        made = (argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args)(args)
    except (AssertionError, ValueError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError("what these flags ask for", f"Megatron says: {error}", "flags that it takes") from error
    global_vars.set_args(args)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    if hybrid:
        made.hybrid_stack_spec = distribute_attention(
            stack_spec(made.transformer), made.transformer, config=options_of()
        )
    elif args.spec is None:
        made.transformer_layer_spec = _with_delta_nets
    models = made.get_builder_cls()(made).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        training.get_megatron_ddp_config(args),
        data_parallel_random_init=False,
        mixed_precision_wrapper=None,
    )
    for model in models:
        enlarge(model)
    return prove(models)


def _with_delta_nets(config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    c = config.transformer
    spec = get_gpt_layer_local_spec(c.num_moe_experts, qk_layernorm=c.qk_layernorm, normalization=c.normalization)
    return distribute_attention(with_delta_nets(spec, c, vp_stage), c, config=options_of())
