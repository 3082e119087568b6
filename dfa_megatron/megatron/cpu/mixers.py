"""Hybrids of Megatron on a CPU: their specs, and functions that stand in for the kernels of mamba-ssm and FLA."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import torch
from torch.nn import functional as F

from dfa_megatron.megatron.hybrid.convolutions import by_pytorch
from dfa_megatron.recurrence.token_loop import delta_rule, linear_attention


def megatrons_stack() -> Any:
    """Return Megatron's class of hybrid stacks (called MambaStack in Megatron-Core 0.16)."""
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack
    except ModuleNotFoundError:
        from megatron.core.ssm.mamba_block import MambaStack

        return MambaStack
    return HybridStack


def shortest(pattern: str) -> str:
    """Return a pattern with every kind of layer of a hybrid's pattern, in its order, and the first kind again."""
    short = "".join(dict.fromkeys(pattern)) + pattern[:1]
    return short if len(short) < len(pattern) else pattern


def stack_spec(config: Any) -> Any:
    """Return the spec of a hybrid stack of Megatron's own modules, without Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stack = megatrons_stack()
    submodules = sys.modules[stack.__module__].MambaStackSubmodules

    def part(module: Any, *nothing: str, **given: Any) -> Any:
        layer = get_gpt_layer_local_spec(normalization=config.normalization, **given)
        layer.module = layer.module if module is None else module
        for name in nothing:
            setattr(layer.submodules, name, IdentityFuncOp if name.endswith("bda") else IdentityOp)
        return layer

    attention = part(
        None, "pre_mlp_layernorm", "mlp", "mlp_bda", qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm
    )
    without = ("input_layernorm", "self_attention", "self_attn_bda")
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    layers = {"attention_layer": attention, "mamba_layer": ModuleSpec(MambaLayer, submodules=mamba)}
    layers["mlp_layer"] = part(MLPLayer, *without)
    if config.num_moe_experts:
        layers["moe_layer"] = part(None, *without, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if hasattr(submodules(), "gdn_layer"):
        layers["gdn_layer"] = copy.deepcopy(attention)
        layers["gdn_layer"].submodules.self_attention = delta_net()
    return ModuleSpec(module=stack, submodules=submodules(**layers))


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
    """Put the functions below where Megatron's mixers look for mamba-ssm's, einops' and FLA's, which need a GPU."""
    from megatron.core.ssm import gated_delta_net, mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    vars(mamba_context_parallel)["HAVE_EINOPS"] = True
    vars(mamba_mixer).update(
        mamba_chunk_scan_combined=_scan,
        mamba_split_conv1d_scan_combined=_convolve_and_scan,
        causal_conv1d_fn=_convolve,
        rearrange=_rearrange,
        ExtendedRMSNorm=_GatedNorm,
        HAVE_MAMBA_SSM=True,
        HAVE_EINOPS=True,
    )
    vars(sys.modules[megatrons_stack().__module__])["TENorm"] = WrappedTorchNorm
    homes = [gated_delta_net]
    if hasattr(gated_delta_net, "__path__"):  # a package since Megatron-Core 0.19
        homes = [importlib.import_module(f"{gated_delta_net.__name__}.{part}") for part in ("common", "gdn")]
    for home in homes:
        vars(home).update(
            chunk_gated_delta_rule=_delta_rule,
            l2norm=_l2norm,
            causal_conv1d=_convolve_tokens,
            causal_conv1d_fn=None,
            HAVE_FLA=True,
        )


def _scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: Any, **given: Any
) -> Any:
    """Compute Mamba-2 of x (batch, tokens, heads, width), dt (batch, tokens, heads), B and C (..., groups, states)."""
    dt = F.softplus(dt + given["dt_bias"])
    b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (b, c))
    ends = _ends(given.get("seq_idx"))
    out, state = linear_attention({"q": c, "k": b, "v": x * dt[..., None], "g": dt * a}, documents=ends)
    state = state[-1:] if ends else state
    skip = given["D"]
    out = out + x * (skip if skip.dim() == 2 else skip[:, None])
    return (out, state.mT) if given.get("return_final_states") else out


def _convolve_and_scan(
    projected: torch.Tensor, weight: torch.Tensor, bias: Any, dt_bias: torch.Tensor, a: torch.Tensor, **given: Any
) -> torch.Tensor:
    """Compute the convolution, the scan and the gate of (batch, tokens, z + x + B + C + dt)."""
    heads, width = len(a), given["headdim"] or given["D"].shape[1]
    inner, groups = heads * width, (weight.shape[0] - heads * width) // 2
    z, mixed, dt = projected.split([inner, inner + 2 * groups, heads], -1)
    ids = given.get("seq_idx")
    x, b, c = by_pytorch(weight, bias)(mixed, _ends(ids)).split([inner, groups, groups], -1)
    b, c = (part.unflatten(-1, (given["ngroups"], -1)) for part in (b, c))
    out = _scan(x.unflatten(-1, (heads, width)), dt, a, b, c, D=given["D"], dt_bias=dt_bias, seq_idx=ids)
    gated: torch.Tensor = out.flatten(2) * F.silu(z)
    return gated


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, seq_idx: Any = None, **_: Any) -> torch.Tensor:
    """Convolve (batch, channels, tokens) with SiLU, which is Megatron's."""
    return by_pytorch(weight, bias)(x.mT, _ends(seq_idx)).mT


def _convolve_tokens(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: str = "silu", **given: Any
) -> tuple[torch.Tensor, None]:
    """Do the same for (batch, tokens, channels)."""
    offsets = given.get("cu_seqlens")
    return by_pytorch(weight, bias)(x, () if offsets is None else tuple(offsets.tolist())), None


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


def _ends(seq_idx: torch.Tensor | None) -> tuple[int, ...]:
    """Return the offsets of documents from the number of each token's, (1, tokens)."""
    if seq_idx is None:
        return ()
    starts = (seq_idx[0].diff().nonzero().flatten() + 1).tolist()
    return (0, *starts, seq_idx.shape[1])


def _rearrange(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """Do what Megatron's mixer asks of einops in training."""
    if pattern == "d 1 w -> d w":
        return x.squeeze(1)
    return x.unflatten(0, (-1, sizes["p"])) if pattern == "(h p) -> h p" else x.transpose(0, 1)


class _GatedNorm(torch.nn.Module):
    """Normalize x * silu(z) in groups, as mamba-ssm's norm does."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        x = x if z is None else x * F.silu(z)
        grouped = x.unflatten(-1, (-1, self.group_size))
        normal = grouped * (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        scaled: torch.Tensor = normal.flatten(-2) * self.weight
        return scaled
