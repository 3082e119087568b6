"""Tiny hybrid models of Megatron's own modules: with Mamba mixers in stacks, and GPTs with gated delta nets."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net, mamba_context_parallel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from dfa_megatron.config import MegatronConfig
from dfa_megatron.megatron import distribute_attention
from tests.support import megatron_model as small_model
from tests.support import state_kernels
from tests.support.models import noise

MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_num_heads": 8}
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "activation_func": torch.nn.functional.silu,
}  # fmt: skip
STATES = {**MAMBA, **DELTA}
KIMIS = "KimiDeltaAttention"
"""In Megatron's development branch alone."""
THREEFOLD = {"mamba_num_groups": 6, "mamba_num_heads": 6}
"""Which Megatron's own context parallelism spreads over three ranks."""
MEGATRONS_SPEC = small_model.megatrons_spec


def delta_net(kind: str = "GatedDeltaNet") -> Any:
    """Return the spec of a delta net of Megatron's own modules, by the name of its class."""
    parts = {"in_proj": ColumnParallelLinear, "out_norm": WrappedTorchNorm, "out_proj": RowParallelLinear}
    parts |= {"beta_proj": ColumnParallelLinear} if kind == KIMIS else {}
    home = vars(gated_delta_net)
    return ModuleSpec(module=home[kind], submodules=home[f"{kind}Submodules"](**parts))


def with_delta_nets(config: Any, stage: int | None = None, *, dense: bool = False, kind: str = "GatedDeltaNet") -> Any:
    """Return Megatron's spec of the model's stage with a delta net in every second layer of a stage."""
    megatrons = MEGATRONS_SPEC(config, stage, dense=dense)
    layers = getattr(megatrons, "layer_specs", [megatrons] * get_num_layers_to_build(config, stage))
    given = [copy.deepcopy(layer) for layer in layers]
    for layer in given[::2]:
        layer.submodules.self_attention = delta_net(kind)
    norm = getattr(megatrons, "layer_norm", None) or LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=given, layer_norm=norm)


def stack_spec() -> Any:
    """Return a stack with Megatron's Mamba mixer and, where this version has a slot for it, its gated delta net."""
    stack = state_kernels.megatrons_stack()
    submodules = sys.modules[stack.__module__].MambaStackSubmodules

    def part(module: Any, *nothing: str) -> Any:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.module = layer.module if module is None else module
        for name in nothing:
            setattr(layer.submodules, name, IdentityFuncOp if name.endswith("bda") else IdentityOp)
        return layer

    attention = part(None, "pre_mlp_layernorm", "mlp", "mlp_bda")
    without = ("input_layernorm", "self_attention", "self_attn_bda")
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    layers = {"attention_layer": attention, "mamba_layer": ModuleSpec(MambaLayer, submodules=mamba)}
    layers["mlp_layer"] = part(MLPLayer, *without)
    for slot, kind in {"gdn_layer": "GatedDeltaNet", "kda_layer": KIMIS}.items():
        if hasattr(submodules(), slot):
            layers[slot] = copy.deepcopy(attention)
            layers[slot].submodules.self_attention = delta_net(kind)
    return ModuleSpec(module=stack, submodules=submodules(**layers))


def predicting_stack() -> Any:
    """Return a stack with a prediction layer, which is a stack itself from Megatron-Core 0.19 on."""
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    parts = prediction.MultiTokenPredictionLayerSubmodules(**norms, eh_proj=ColumnParallelLinear)
    layer = ModuleSpec(prediction.MultiTokenPredictionLayer, submodules=parts)
    block = prediction.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    spec = stack_spec()
    spec.submodules.mtp_block_spec = ModuleSpec(prediction.MultiTokenPredictionBlock, submodules=block)
    return spec


def model(pattern: str, config: Any, options: MegatronConfig | None, **given: Any) -> Any:
    """Return Megatron's class of hybrid models with layers of a pattern, of 0.19 and newer: what 0.16 lacks is left.

    "G", a gated delta net, is "*" there; "/" begins a prediction layer.
    """
    vars(mamba_context_parallel)["repeat"] = repeat
    maker, name = hybrid_class()
    new = name == "hybrid_layer_pattern"
    pattern = pattern if new else pattern.partition("/")[0].replace("G", "*")
    spec = predicting_stack() if config.mtp_num_layers else stack_spec()
    spec = spec if options is None else distribute_attention(spec, config, config=options)
    length, vocabulary = given.pop("max_sequence_length"), given.pop("vocab_size")
    made = maker(config, spec, vocabulary, length, **{name: pattern}, **given)
    small_model.set_weights(made)
    return made


def set_weights_of_a_rank(made: Any) -> None:
    """Give weights that depend on names and the tensor-parallel rank alone."""
    for name, parameter in made.named_parameters():
        mine = parallel_state.get_tensor_model_parallel_rank() * getattr(parameter, "tensor_model_parallel", False)
        parameter.data.copy_(noise(f"{name} {mine}", tuple(parameter.shape)) * 0.1 + ("norm" in name))


def hybrid_class() -> tuple[Any, str]:
    """Return the class of hybrid models, MambaModel in Megatron-Core 0.16, and its argument for a pattern."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ModuleNotFoundError:
        from megatron.core.models.mamba.mamba_model import MambaModel

        return MambaModel, "hybrid_override_pattern"
    return HybridModel, "hybrid_layer_pattern"


def repeat(x: Any, pattern: str, g: int, n: int, r: int) -> Any:
    """einops, as far as Megatron's context parallelism of Mamba mixers uses it: r ranks share a group's states."""
    assert pattern == "l b (g n) -> l b (g r n)"
    return x.unflatten(-1, (g, n)).repeat_interleave(r, -2).flatten(-2)


def build(spec: Any, config: Any, groups: Any, layers: str = "M*-M*") -> Any:
    """Return a stack by itself."""
    takes = inspect.signature(spec.module.__init__).parameters
    pattern = {"layer_type_list": list(layers)} if "layer_type_list" in takes else {"hybrid_override_pattern": layers}
    return build_module(spec, config=config, post_layer_norm=False, pg_collection=groups, **pattern).train()
