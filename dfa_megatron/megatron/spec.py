"""Put distributed attention into any Megatron layer spec, and serve Megatron's `--spec` flag."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.door import follow_language_models
from dfa_megatron.megatron.hybrid.in_order import OTHER_ORDER, in_order_class, is_delta
from dfa_megatron.megatron.hybrid.recomputed import ATTENTION_SLOTS, MIXERS, recomputed_class
from dfa_megatron.megatron.hybrid.stack import default_stack_spec, is_stack
from dfa_megatron.megatron.layers.context import CONTEXT, AttentionContext
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.layers.layer import layer_class
from dfa_megatron.megatron.layers.norm import SequenceParallelNorm
from dfa_megatron.megatron.layers.prediction import follow_batches, replace
from dfa_megatron.megatron.layers.recompute import asked_of
from dfa_megatron.megatron.output import follow_outputs
from dfa_megatron.megatron.proved_job import prove_if_asked
from dfa_megatron.megatron.start.dfa_flags import global_args, options_of

_NORMS = (
    "input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm",
    "norm", "out_norm",
)  # fmt: skip
"""The slots of layers, attentions and mixers that hold a norm."""
_REPLACED = ("DotProductAttention", "TEDotProductAttention", "DistributedCoreAttention")
"""Core attentions whose every setting is in the config: Megatron's two, and ours."""
_NO_ATTENTION = ("IdentityOp", "ColumnParallelLinearGathered", "TELayerNormColumnParallelLinearGathered")
"""What Megatron's heterogeneous specs put in the place of an attention: it treats each token by itself."""
_NOT_IN_SPEC = (
    "kitchen_config_file", "kitchen_recipe_number", "mla_down_proj_fusion", "num_experts",
    "use_grouped_gemm_for_dense_mlp", "use_kitchen", "use_te_activation_func",
)  # fmt: skip
"""Flags that Megatron's default spec honours in some versions up to 0.18, and the one that is made here does not."""


def distribute_attention(
    spec: Any,
    transformer_config: Any = None,
    *,
    config: DistAttentionConfig | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> Any:
    """Return a copy of a Megatron spec whose layers run distributed attention.

        options = DistAttentionConfig(data_layout="contiguous", remat="on")
        spec = distribute_attention(get_gpt_layer_local_spec(), transformer_config, config=options)
        model = GPTModel(transformer_config, spec, vocab_size, max_sequence_length, ...)
        batch = shard_batch(batch, parallel_state.get_context_parallel_group(), options)
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    Args:
        spec: a layer spec (ModuleSpec of a TransformerLayer), TransformerBlockSubmodules (for instance of a model with
            experts in some layers), or the stack spec of a hybrid model. Its modules are Transformer Engine's or
            Megatron's own.
        transformer_config: the TransformerConfig. If given, it is checked now and not when the model is built. Sequence
            parallelism without Transformer Engine and Apex needs it to replace the norms (see layers/norm.py).
        config: this package's options. data_layout="contiguous" needs batches from `shard_batch`.
        vp_stage: the virtual pipeline stage, as for Megatron's get_num_layers_to_build. It matters only if the final
            norm is replaced.
        pp_rank: the pipeline rank, likewise.

    Returns:
        The same kind of spec. A layer spec becomes TransformerBlockSubmodules if the final norm is replaced.
        GPTModel takes both.

    Raises:
        UnsupportedError: the spec or the configuration would give wrong numbers silently.
    """
    options = config or DistAttentionConfig()
    options.refuse_outside("megatron", "remat='on'")
    follow_batches()
    follow_language_models()
    follow_outputs()
    context = AttentionContext(options, hybrid=is_stack(spec))
    if transformer_config is not None:
        context.check(transformer_config)
    if context.hybrid:
        return _stack(spec, transformer_config, context)
    if getattr(transformer_config, "heterogeneous_block_specs", False):
        context.recompute = asked_of(transformer_config, context)
    if isinstance(spec, TransformerBlockSubmodules):
        block = copy.copy(spec)
        setattr(block, CONTEXT, context)
        block.layer_specs = [_layer(layer, transformer_config, context) for layer in spec.layer_specs or []]
        block.layer_norm = _norm(spec.layer_norm, transformer_config)
        return block
    layer = _layer(spec, transformer_config, context)
    final_norm = transformer_block.LayerNormImpl
    if _norm(final_norm, transformer_config) is final_norm:
        return layer
    layers = get_num_layers_to_build(transformer_config, vp_stage, pp_rank)
    block = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=_norm(final_norm, transformer_config))
    setattr(block, CONTEXT, context)
    return block


def _layer(spec: Any, config: Any, context: AttentionContext) -> ModuleSpec:
    attention: Any = getattr(getattr(spec, "submodules", None), "self_attention", None)
    if getattr(getattr(attention, "module", None), "__name__", None) in _NO_ATTENTION:
        return _wrapped(spec, config, context)
    if is_delta(getattr(attention, "module", None)):
        layer = _wrapped(spec, config, context)
        layer.submodules.self_attention = _mixer(attention, config, context)
        return layer
    if not isinstance(spec, ModuleSpec) or not hasattr(getattr(attention, "submodules", None), "core_attention"):
        raise UnsupportedError(
            f"a spec of type {type(spec).__name__}",
            "it has no submodules.self_attention.submodules.core_attention to replace",
            "the spec of one TransformerLayer, or TransformerBlockSubmodules of such",
        )
    _check_replaced(attention.submodules.core_attention)
    layer = _wrapped(spec, config, context)
    layer.submodules.self_attention = copy.copy(attention)
    layer.submodules.self_attention.submodules = copy.copy(attention.submodules)
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=DistributedCoreAttention, params={"options": context.options, "checked": True}
    )
    _replace_norms(layer.submodules.self_attention.submodules, config)
    return layer


def _wrapped(spec: Any, config: Any, context: AttentionContext) -> ModuleSpec:
    layer = copy.copy(spec)  # the changed parts are copied, the rest is shared with the given spec
    layer.submodules = copy.copy(spec.submodules)
    layer.module = layer_class(spec.module)
    layer.params = {**(spec.params or {}), "distributed_attention": context}
    _replace_norms(layer.submodules, config)
    return layer


def _mixer(spec: Any, config: Any, context: AttentionContext) -> ModuleSpec:
    mixer: ModuleSpec = copy.copy(spec)
    mixer.module = in_order_class(spec.module)
    mixer.params = {**(spec.params or {}), "options": context.options}
    mixer.submodules = copy.copy(spec.submodules)
    _replace_norms(mixer.submodules, config)
    return mixer


def _check_replaced(core_attention: Any) -> None:
    """Refuse to replace an attention that may do more than softmax attention: caps, scales, windows."""
    spec = core_attention if isinstance(core_attention, ModuleSpec) else ModuleSpec(module=core_attention)
    made: Any = spec.module
    known = str(getattr(made, "__module__", "")).startswith(("megatron.core.", "dfa_megatron."))
    if known and made.__name__ in _REPLACED and not set(spec.params or {}) - {"options", "checked"}:
        return
    params = f" with params {sorted(spec.params)}" if spec.params else ""
    raise UnsupportedError(
        f"a spec whose core_attention is {getattr(made, '__qualname__', made)}{params}",
        "everything that it does beside softmax attention (caps, scales, windows, masks) would be dropped",
        "a spec with Megatron's DotProductAttention or TEDotProductAttention, without parameters of its own",
    )


def _stack(spec: Any, config: Any, context: AttentionContext) -> ModuleSpec:
    stack = copy.copy(spec)
    stack.submodules = copy.copy(spec.submodules)
    for slot, layer in vars(spec.submodules).items():
        if not isinstance(layer, ModuleSpec) or slot == "mtp_block_spec":  # prediction layers consist of these layers
            continue
        if slot in ATTENTION_SLOTS:
            made = _layer(layer, config, context)
        else:
            made = copy.copy(layer)
            made.submodules = copy.copy(layer.submodules)
            made.module = recomputed_class(layer.module)
            made.params = {**(layer.params or {}), "distributed_attention": context}
            _replace_norms(made.submodules, config)
            if slot in MIXERS and context.options.layout_inside == "contiguous":
                mixer = getattr(made.submodules, MIXERS[slot], None)
                if not isinstance(mixer, ModuleSpec):
                    raise UnsupportedError(f"a hybrid stack whose {slot} has the mixer {mixer}", *OTHER_ORDER)
                setattr(made.submodules, MIXERS[slot], _mixer(mixer, config, context))
        setattr(stack.submodules, slot, made)
    return stack


def hybrid_stack_spec() -> Any:
    """Return Megatron's hybrid stack spec, distributed, for `--spec dfa_megatron.megatron hybrid_stack_spec`."""
    prove_if_asked(global_args())
    return distribute_attention(default_stack_spec(), config=options_of())


def _norm(norm: Any, config: Any) -> Any:
    """Return the norm to use: ours in place of Megatron's PyTorch norm, which refuses sequence parallelism."""
    stands_in = config is not None and config.sequence_parallel and norm is WrappedTorchNorm
    return SequenceParallelNorm if stands_in else norm


def _replace_norms(submodules: Any, config: Any) -> None:
    for slot in _NORMS:
        if hasattr(submodules, slot):
            setattr(submodules, slot, _norm(getattr(submodules, slot), config))


def get_spec(model_cfg: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's default spec, distributed, for `--spec dfa_megatron.megatron get_spec` (0.19 and later).

    Options come from the script's `--dfa-*` flags (see start/dfa_flags.py). A script without them gets layout
    boundary, which works with Megatron's own batches.

    Args:
        model_cfg: Megatron's GPTModelConfig.
        vp_stage: the virtual pipeline stage that is being built.
    """
    from megatron.training.models.gpt import default_layer_spec

    prove_if_asked(global_args())
    _distribute_predictions()
    given = [model_cfg, vp_stage] if "vp_stage" in inspect.signature(default_layer_spec).parameters else [model_cfg]
    return distribute_attention(
        default_layer_spec(*given), model_cfg.transformer, config=options_of(), vp_stage=vp_stage
    )


def _distribute_predictions() -> None:
    """Make the layers of multi-token prediction that a script builds distributed; Megatron makes their spec itself."""

    def replacing(megatrons: Any) -> Any:
        @functools.wraps(megatrons)
        def distributed(config: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
            return megatrons(config, distribute_prediction(spec, config), *args, **kwargs)

        return distributed

    replace(gpt_layer_specs.__name__, "get_gpt_mtp_block_spec", replacing)


def distribute_prediction(spec: Any, config: Any) -> Any:
    """Return the distributed spec of a prediction layer from its own, or from a decoder's, whose last layer it is."""
    layers = spec.layer_specs[-1:] if isinstance(spec, TransformerBlockSubmodules) else [spec]
    # A block, because Megatron accepts a layer spec only if its class is exactly TransformerLayer.
    return distribute_attention(TransformerBlockSubmodules(layer_specs=layers), config, config=options_of())


def spec_from_args() -> Any:
    """Return the object for `--spec dfa_megatron.megatron SPEC` (scripts up to Megatron-Core 0.18 take no function).

    Raises:
        UnsupportedError: not in a Megatron script, or the model's default spec has more than one kind of layer.
    """
    args = global_args()
    if args is None:
        raise UnsupportedError(
            "SPEC outside a Megatron script",
            "it is made from Megatron's global arguments",
            "distribute_attention(spec, transformer_config, config=...)",
        )
    prove_if_asked(args)
    _distribute_predictions()
    names = [*_NOT_IN_SPEC, *(["sequence_parallel"] if transformer_block.LayerNormImpl is WrappedTorchNorm else [])]
    on = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) not in (None, False)]
    if on:
        raise UnsupportedError(
            f"SPEC with {', '.join(on)}",
            "the spec that is made here does not have it, or needs the model's config, which scripts up to "
            "Megatron-Core 0.18 do not pass on",
            "leaving it out, distribute_attention in a model provider of your own, or Megatron-Core 0.19 and get_spec",
        )
    shared = {
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
        "qk_l2_norm": args.qk_l2_norm,
    }
    if args.transformer_impl == "transformer_engine":
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**shared)
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=args.normalization, **shared)
    return distribute_attention(layer, config=options_of(args))
