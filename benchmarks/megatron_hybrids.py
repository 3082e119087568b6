"""A group of layers of a hybrid in Megatron-Core: gated delta nets, and an attention after every three of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.megatron_common import Shape

EVERY = 4
"""Layers, of which the last is attention."""


def fields(shape: Shape, *, transformer_engine: bool) -> dict[str, Any]:
    """Return what the TransformerConfig of Qwen3-Next has more: as many key heads as query heads, half as wide.

    Megatron-Core 0.16 refuses the variant's name over several ranks, so it stands where Megatron's own spec needs it.
    """
    width = shape.head_dim // 2
    return {
        **({"experimental_attention_variant": "gated_delta_net"} if transformer_engine else {}),
        "linear_attention_freq": EVERY,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_num_key_heads": shape.heads,
        "linear_num_value_heads": 2 * shape.heads,
    }


def spec(config: Any, *, transformer_engine: bool) -> Any:
    """Return the spec of the whole block: Megatron's with Transformer Engine, or one of its own modules."""
    if transformer_engine:
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec,
        )

        return get_transformer_block_with_experimental_attention_variant_spec(config)
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [_layer(delta=number % EVERY != 0) for number in range(1, config.num_layers + 1)]
    return TransformerBlockSubmodules(layer_specs=layers)


def _layer(*, delta: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    if delta:
        parts = {"in_proj": ColumnParallelLinear, "out_norm": WrappedTorchNorm, "out_proj": RowParallelLinear}
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**parts))
    return layer


def kernels_installed() -> bool:
    """Return whether Megatron found the kernels of gated delta nets (fla-core)."""
    from megatron.core.ssm import gated_delta_net

    return bool(gated_delta_net.HAVE_FLA)
