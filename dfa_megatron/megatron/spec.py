"""Put distributed attention into any Megatron layer spec: of a layer, of a block, or of a hybrid stack."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss.deferred import WATCHED
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.door import with_door
from dfa_megatron.megatron.in_order import OTHER_ORDER, in_order_class, is_delta
from dfa_megatron.megatron.layers.context import CONTEXT, AttentionContext
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.layers.layer import DistributedAttentionLayer, DistributedLayer
from dfa_megatron.megatron.layers.prediction import counting, rolling
from dfa_megatron.megatron.output import scores
from dfa_megatron.megatron.replace import replace, with_ours
from dfa_megatron.runtime.environment import warn_of_untested

_ATTENTION_SLOTS = ("attention_layer", "mla_layer")
"""The submodules of a hybrid stack that hold TransformerLayers with a core_attention."""
_MIXERS = {"mamba_layer": "mixer", "gdn_layer": "self_attention", "kda_layer": "self_attention"}
"""The submodules of a hybrid stack with a recurrence, and where in them it is."""
_REPLACED = ("DotProductAttention", "TEDotProductAttention", "DistributedCoreAttention")
"""Core attentions whose every setting is in the config: Megatron's two, and ours."""
_NO_ATTENTION = ("IdentityOp", "ColumnParallelLinearGathered", "TELayerNormColumnParallelLinearGathered")
"""What Megatron's heterogeneous specs put in the place of an attention: it treats each token by itself."""


def distribute_attention(
    spec: Any,
    transformer_config: Any = None,
    *,
    config: MegatronConfig | None = None,
) -> Any:
    """Return a copy of a Megatron spec, of the same kind, whose layers run distributed attention.

        options = MegatronConfig(data_layout="contiguous", checkpoint="remat")
        spec = distribute_attention(get_gpt_layer_local_spec(), transformer_config, config=options)
        model = GPTModel(transformer_config, spec, vocab_size, max_sequence_length, ...)
        losses = model(**shard_batch(batch, parallel_state.get_context_parallel_group(), options))

    Args:
        spec: a layer spec (ModuleSpec of a TransformerLayer), TransformerBlockSubmodules (for instance of a model with
            experts in some layers), or the stack spec of a hybrid model.
        transformer_config: the TransformerConfig. If given, it is checked now and not when the model is built.
        config: this package's options. data_layout="contiguous" needs batches from `shard_batch`.

    Raises:
        UnsupportedError: the spec or the configuration would give wrong numbers silently.
    """
    warn_of_untested()
    if (MAJOR, MINOR) in ((0, 17), (0, 18)):
        raise UnsupportedError(f"Megatron-Core 0.{MINOR}", "it is not tested", "0.16.1, or 0.19 and later")
    options = MegatronConfig.of(config)
    _replace_names(options)
    context = AttentionContext(options, hybrid=is_stack(spec))
    if transformer_config is not None:
        check_config(transformer_config, options)
    made: Any
    if isinstance(spec, TransformerBlockSubmodules):
        made = copy.copy(spec)
        made.layer_specs = [_layer(layer, context) for layer in spec.layer_specs or []]
    else:
        made = _stack(spec, context) if context.hybrid else _layer(spec, context)
    setattr(made, CONTEXT, context)
    return made


def _replace_names(options: MegatronConfig) -> None:
    """Replace what Megatron's models call by name; outside of a distributed model they stay Megatron's."""
    replace(LanguageModule, "__init__", with_door)
    setattr(LanguageModule, WATCHED, scores)
    replace(multi_token_prediction, "roll_tensor", rolling)
    replace(multi_token_prediction, "process_mtp_loss", counting, optional=(MAJOR, MINOR) < (0, 19))
    replace(WrappedTorchNorm, "__new__", bearing_sequence_parallelism)


def _layer(spec: Any, context: AttentionContext) -> ModuleSpec:
    attention: Any = getattr(getattr(spec, "submodules", None), "self_attention", None)
    kind: Any = getattr(attention, "module", None)
    if getattr(kind, "__name__", None) in _NO_ATTENTION:
        return _wrapped(spec, context)
    if is_delta(kind):
        attention = _changed(attention, in_order_class(kind), options=context.options)
    else:
        is_layer = isinstance(spec, ModuleSpec) and issubclass(spec.module, TransformerLayer)
        if not is_layer or not hasattr(getattr(attention, "submodules", None), "core_attention"):
            raise UnsupportedError(
                f"a spec of {getattr(spec, 'module', type(spec)).__name__}",
                "it is no layer with submodules.self_attention.submodules.core_attention to replace",
                "the spec of one TransformerLayer, or TransformerBlockSubmodules of such",
            )
        _check_replaced(attention.submodules.core_attention)
        attention = _changed(attention, kind)
        attention.submodules.core_attention = ModuleSpec(
            module=DistributedCoreAttention, params={"options": context.options}
        )
    layer = _wrapped(spec, context)
    layer.submodules.self_attention = attention
    return layer


def _wrapped(spec: Any, context: AttentionContext, mixin: type = DistributedAttentionLayer) -> ModuleSpec:
    return _changed(spec, with_ours(mixin, spec.module), distributed_attention=context)


def _changed(spec: Any, module: Any, **params: Any) -> ModuleSpec:
    """Return a copy of a spec with another module and more parameters, whose submodules may be set."""
    made: ModuleSpec = copy.copy(spec)
    made.module = module
    made.params = {**(spec.params or {}), **params}
    made.submodules = copy.copy(spec.submodules)
    return made


def _check_replaced(core_attention: Any) -> None:
    """Refuse to replace an attention that may do more than softmax attention: caps, scales, windows."""
    spec = core_attention if isinstance(core_attention, ModuleSpec) else ModuleSpec(module=core_attention)
    made: Any = spec.module
    known = str(getattr(made, "__module__", "")).startswith(("megatron.core.", "dfa_megatron."))
    if known and made.__name__ in _REPLACED and not set(spec.params or {}) - {"options"}:
        return
    params = f" with params {sorted(spec.params)}" if spec.params else ""
    raise UnsupportedError(
        f"a spec whose core_attention is {getattr(made, '__qualname__', made)}{params}",
        "everything that it does beside softmax attention (caps, scales, windows, masks) would be dropped",
        "a spec with Megatron's DotProductAttention or TEDotProductAttention, without parameters of its own",
    )


def _stack(spec: Any, context: AttentionContext) -> ModuleSpec:
    stack = _changed(spec, spec.module)
    for slot, layer in vars(spec.submodules).items():
        if not isinstance(layer, ModuleSpec) or slot == "mtp_block_spec":  # prediction layers consist of these layers
            continue
        if slot in _ATTENTION_SLOTS:
            made = _layer(layer, context)
        else:
            made = _wrapped(layer, context, DistributedLayer)
            if slot in _MIXERS and context.options.layout_inside == "contiguous":
                mixer = getattr(made.submodules, _MIXERS[slot], None)
                if not isinstance(mixer, ModuleSpec):
                    raise UnsupportedError(f"a hybrid stack whose {slot} has the mixer {mixer}", *OTHER_ORDER)
                ours = _changed(mixer, in_order_class(mixer.module), options=context.options)
                setattr(made.submodules, _MIXERS[slot], ours)
        setattr(stack.submodules, slot, made)
    return stack


def is_stack(spec: Any) -> bool:
    """Return whether a spec is for a HybridStack (called MambaStack in Megatron-Core 0.16)."""
    submodules = getattr(spec, "submodules", None)
    return hasattr(submodules, "attention_layer") and hasattr(submodules, "mamba_layer")


def bearing_sequence_parallelism(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """Make Megatron's PyTorch norm, in its __new__, with sequence parallelism too, which Megatron refuses.

    Each rank normalises its own rows. Only the weights need a mark, by which Megatron sums their gradients over the
    tensor-parallel ranks.
    """

    def make(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return megatrons(cls, config, hidden_size, eps, *args, **kwargs)  # type: ignore[no-any-return]
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds or getattr(config, "layernorm_zero_centered_gamma", False):
            raise UnsupportedError(
                f"normalization={config.normalization!r} with sequence parallelism",
                "without Transformer Engine or Apex only plain LayerNorm and RMSNorm are done",
                "LayerNorm, RMSNorm, or an installation with Transformer Engine",
            )
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    return make
