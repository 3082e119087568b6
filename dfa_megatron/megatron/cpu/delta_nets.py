"""Gated delta nets of Megatron on a CPU: their layers in a spec, and functions that stand in for FLA's kernels."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch

from dfa_megatron.megatron.hybrid.convolutions import by_pytorch
from dfa_megatron.recurrence.token_loop import delta_rule


def with_delta_nets(spec: Any, config: Any, stage: int | None) -> Any:
    """Return the spec of a stage's block, with a gated delta net in the layers that `linear_attention_freq` names.

    spec: of one layer, or of the block where some layers have experts. Its modules are Megatron's own.
    """
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    count = transformer_block.get_num_layers_to_build(config, stage)
    layers = [copy.deepcopy(layer) for layer in getattr(spec, "layer_specs", [spec] * count)]
    first = get_transformer_layer_offset(config, stage)
    for layer, recurrent in zip(layers, get_linear_attention_pattern(config)[first : first + count], strict=True):
        if recurrent:
            layer.submodules.self_attention = delta_net()
    norm = getattr(spec, "layer_norm", None) or transformer_block.LayerNormImpl
    return transformer_block.TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def delta_net() -> Any:
    """Return the spec of a gated delta net of Megatron's own modules."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = {"in_proj": ColumnParallelLinear, "out_norm": WrappedTorchNorm, "out_proj": RowParallelLinear}
    return ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**parts))


def use_stand_ins() -> None:
    """Put the functions below where Megatron's gated delta nets look for FLA's, which need a GPU."""
    homes = ["megatron.core.ssm.gated_delta_net"]
    found = importlib.import_module(homes[0])
    if hasattr(found, "__path__"):  # a package since Megatron-Core 0.19
        homes = [f"{homes[0]}.{part}" for part in ("common", "gdn")]
    for home in map(importlib.import_module, homes):
        vars(home).update(
            chunk_gated_delta_rule=_delta_rule,
            l2norm=_l2norm,
            causal_conv1d=_convolution,
            causal_conv1d_fn=None,
            HAVE_FLA=True,
        )


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a gated delta rule of (batch, tokens, heads, width), with queries of FLA's default scale."""
    offsets = given.get("cu_seqlens")
    documents = () if offsets is None else tuple(offsets.tolist())
    tokens = {"q": q * k.shape[-1] ** -0.5, "k": k, "v": v, "g": g, "beta": beta}
    return delta_rule(tokens, given.get("initial_state"), documents)


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: str = "silu", **given: Any
) -> tuple[torch.Tensor, None]:
    """Convolve (batch, tokens, channels) with SiLU, which is Megatron's."""
    offsets = given.get("cu_seqlens")
    return by_pytorch(weight, bias)(x, () if offsets is None else tuple(offsets.tolist())), None
