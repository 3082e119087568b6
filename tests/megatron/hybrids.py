"""Tiny hybrid models of Megatron's own modules: stacks with Mamba mixers, and GPTs with gated delta nets."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch

from dfa_megatron.config import MegatronConfig
from tests.megatron import harness
from tests.megatron.harness import MEGATRONS, Topology, case
from tests.support import megatron_model as small_model
from tests.support import state_kernels
from tests.support.models import noise

PATTERN = "M*-M*"
MAMBA = (("mamba_state_dim", 8), ("mamba_head_dim", 16), ("mamba_num_groups", 2), ("mamba_num_heads", 8))
THREEFOLD = (("mamba_state_dim", 8), ("mamba_head_dim", 16), ("mamba_num_groups", 6), ("mamba_num_heads", 6))
"""Which Megatron's own context parallelism spreads over three ranks."""
DELTA = (
    ("linear_conv_kernel_dim", 4), ("linear_key_head_dim", 8), ("linear_value_head_dim", 16),
    ("linear_num_key_heads", 2), ("linear_num_value_heads", 4), ("activation_func", torch.nn.functional.silu),
)  # fmt: skip


def delta_net() -> Any:
    """Return the spec of a gated delta net of Megatron's own modules."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = {"in_proj": ColumnParallelLinear, "out_norm": WrappedTorchNorm, "out_proj": RowParallelLinear}
    return ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**parts))


def delta_spec() -> Any:
    """A TransformerLayer with a gated delta net, of Megatron's own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention = delta_net()
    return layer


def stack_spec() -> Any:
    """A stack with Megatron's Mamba mixer and, where this version has a slot for it, its gated delta net."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

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
    if hasattr(submodules(), "gdn_layer"):
        layers["gdn_layer"] = copy.deepcopy(attention)
        layers["gdn_layer"].submodules.self_attention = delta_net()
    return ModuleSpec(module=stack, submodules=submodules(**layers))


def build_stack(spec: Any, config: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    layers = "M*-MG" if hasattr(spec.submodules, "gdn_layer") else "M*-M*"
    return build(spec, config, ProcessGroupCollection.use_mpu_process_groups(), layers)


def repeat(x: torch.Tensor, pattern: str, g: int, n: int, r: int) -> torch.Tensor:
    """einops, as far as Megatron's context parallelism of Mamba mixers uses it: r ranks share a group's states."""
    assert pattern == "l b (g n) -> l b (g r n)"
    return x.unflatten(-1, (g, n)).repeat_interleave(r, -2).flatten(-2)


def build_mixers(spec: Any, config: Any) -> Any:
    """A stack without a gated delta net, whose heads three ranks do not divide."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import mamba_context_parallel

    vars(mamba_context_parallel)["repeat"] = repeat
    return build(spec, config, ProcessGroupCollection.use_mpu_process_groups())


def build_gpt(spec: Any, config: Any) -> Any:
    """A block of gated delta nets and an attention: the decoder of a GPT."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TransformerBlock(config, spec, post_layer_norm=False, pg_collection=groups).train()


def block_spec() -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [
        delta_spec(),
        delta_spec(),
        harness.megatrons_spec(harness.make_config(Topology(), MEGATRONS)),
        delta_spec(),
    ]
    return TransformerBlockSubmodules(layer_specs=layers)


MODELS = {
    "mamba": (stack_spec, build_stack, len(PATTERN), (*MAMBA, *DELTA)),
    "mixers": (stack_spec, build_mixers, len(PATTERN), THREEFOLD),
    "delta": (block_spec, build_gpt, 4, DELTA),
}


def build(spec: Any, config: Any, groups: Any, layers: str = PATTERN) -> Any:
    from megatron.core.transformer.spec_utils import build_module

    takes = inspect.signature(spec.module.__init__).parameters
    pattern = {"layer_type_list": list(layers)} if "layer_type_list" in takes else {"hybrid_override_pattern": layers}
    return build_module(spec, config=config, post_layer_norm=False, pg_collection=groups, **pattern).train()


def headless(config: Any, decoder: Any) -> Any:
    """The layers as a language model without embedding and head: hidden states come in and go out."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    class Headless(LanguageModule):
        pre_process, post_process, share_embeddings_and_output_weights = True, False, False

        def __init__(self) -> None:
            super().__init__(config)
            self.decoder = decoder

        def forward(self, decoder_input: Any, attention_mask: Any, **given: Any) -> Any:
            return self.decoder(decoder_input, attention_mask, **given)

    return Headless()


def make(model: str, topology: Topology, options: MegatronConfig | None, tp_rank: int, **more: Any) -> Any:
    """The layers with weights that depend on names and the tensor-parallel rank alone; more: fields of its config."""
    from dfa_megatron.megatron import distribute_attention

    spec_of, build, layers, fields = MODELS[model]
    wanted = MEGATRONS if options is None else case(options.data_layout)
    # Megatron's PyTorch norms refuse sequence parallelism.
    spread = options is not None and topology.tp > 1
    config = harness.make_config(topology, wanted, num_layers=layers, sequence_parallel=spread, **dict(fields), **more)
    spec = spec_of()
    made = build(spec if options is None else distribute_attention(spec, config, config=options), config)
    for name, parameter in made.named_parameters():
        mine = tp_rank if getattr(parameter, "tensor_model_parallel", False) else ""
        parameter.data.copy_(noise(f"{name} {mine}", tuple(parameter.shape)) * 0.3 + ("norm" in name))
    return headless(config, made).train()


def with_delta_nets(config: Any, stage: int | None = None, *, dense: bool = False) -> Any:
    """Megatron's spec of the model's stage with a gated delta net in all layers but each stage's last."""
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    megatrons = MEGATRONS_SPEC(config, stage, dense=dense)
    count = get_num_layers_to_build(config, stage)
    layers = getattr(megatrons, "layer_specs", [megatrons] * count)
    delta = delta_spec().submodules.self_attention
    given = [copy.deepcopy(layer) for layer in layers]
    for layer in given[::2]:
        layer.submodules.self_attention = delta
    norm = getattr(megatrons, "layer_norm", None) or LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=given, layer_norm=norm)


MEGATRONS_SPEC = small_model.megatrons_spec


def in_a_gpt(rank: int, ranks: int, function: Any, *args: Any) -> Any:
    """Run a function of the harness on GPTs with gated delta nets."""
    state_kernels.install()
    small_model.megatrons_spec = with_delta_nets
    try:
        with torch.compiler.set_stance("force_eager"):
            return function(rank, ranks, *args)
    finally:
        small_model.megatrons_spec = MEGATRONS_SPEC
