"""What the Megatron-Core benchmarks share: shapes, modes, ranks, and the configuration and spec of their layers.

The layers are Llama-shaped, or a group of a hybrid: gated delta nets, and an attention after every three of them.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

# Megatron demands this on Hopper; it must stand before CUDA starts, so it is set before torch is imported.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch.distributed as dist

from dfa_megatron import MegatronConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's layers, as Megatron names them."""

    hidden_size: int = 4096
    heads: int = 32
    groups: int = 8
    ffn: int = 14336
    width: int = 0
    """Of a head; 0: the hidden size over the heads."""
    hybrid: bool = False
    """Three gated delta nets before each attention."""
    asked: int = 0
    """Heads without the padding that tensor parallelism on more GPUs needs; 0: there is none."""

    @property
    def head_dim(self) -> int:
        """Return the width of queries, keys and values."""
        return self.width or self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """Return the weights of one layer's linear layers."""
        attention = self.hidden_size * (2 * self.hidden_size + 2 * self.groups * self.head_dim)
        return attention + 3 * self.hidden_size * self.ffn

    def layer_flop(self, length: int) -> float:
        """Return the FLOP of a layer's forward over a causal sequence; the backward has twice as many."""
        return 2.0 * self.layer_parameters * length + 2.0 * length * length * self.hidden_size


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the layers."""

    name: str
    checkpoint: str | None
    """MegatronConfig.checkpoint; None is Megatron's own attention through Transformer Engine."""
    full: bool
    """--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
    offload: bool = False
    transformer_engine: bool = False
    """Its modules around the attention."""
    fp8: bool = False
    """Its linear layers in 8 bits."""
    layout: str = "contiguous"
    """Of ours: the one that costs nothing, or boundary, which takes Megatron's own batches."""
    tensor: bool = False
    """All ranks share each layer's weights and heads (tensor and sequence parallelism), and none a sequence."""

    def options(self, kernel: str, schedule: str) -> MegatronConfig | None:
        """Return our options, or None if attention is Megatron's."""
        if self.checkpoint is None:
            return None
        return MegatronConfig(
            kernel=kernel,
            schedule=schedule,
            data_layout=self.layout,
            checkpoint=self.checkpoint,
            remat_offload=self.offload,
        )


MODES = {
    mode.name: mode
    for mode in (
        Mode("remat", "remat", full=False),
        Mode("remat-offload", "remat", full=False, offload=True),
        Mode("remat-boundary", "remat", full=False, layout="boundary"),
        Mode("full", "none", full=True),
        Mode("none", "none", full=False),
        Mode("remat-te", "remat", full=False, transformer_engine=True),
        Mode("remat-te-fp8", "remat", full=False, transformer_engine=True, fp8=True),
        Mode("te", None, full=False, transformer_engine=True),
        Mode("te-full", None, full=True, transformer_engine=True),
        Mode("tp-te-full", None, full=True, transformer_engine=True, tensor=True),
        Mode("tp-full", None, full=True, tensor=True),
    )
}

NAMED = {
    "qwen3-next": Shape(2048, 16, 2, 5120, width=256, hybrid=True),
    "7b": Shape(4096, 32, 32, 11008),
    "gqa": Shape(4096, 32, 8, 11008),
    "33h": Shape(4224, 33, 33, 11008),
    **{f"33h-as-{heads}": Shape(4224, heads, heads, 11008, width=128, asked=33) for heads in (34, 40)},
    **{f"{heads}h": Shape(128 * heads, heads, heads, 11008) for heads in (16, 8, 4, 2)},
}
"""Qwen3-Next's without experts; of DISTFLASHATTN's models (arXiv 2310.03294) LLaMA-7B, and with other heads of 128, 33
of them also padded as 2 and 8 GPUs need."""


EVERY = 4
"""Layers, of which the last is attention."""


def refusal(mode: Mode, shape: Shape, ranks: int) -> str | None:
    """Return why a mode cannot run on these ranks, or None."""
    if shape.asked and not mode.tensor:
        return f"{shape.asked} heads need no padding"
    if mode.tensor and shape.heads % ranks:
        padded = -(-shape.heads // ranks) * ranks
        more = 100 * (padded / shape.heads - 1)
        return f"{ranks} ranks do not divide {shape.heads} heads; {padded} with padding are {more:.0f} % more"
    if shape.hybrid and not _hybrid_kernels():
        return "fla-core is not installed"
    if mode.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    return None


def arrange(tensor: int) -> None:
    """Make Megatron's groups, unless they are so: `tensor` ranks share each layer's weights, the others a sequence."""
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        from dfa_megatron.megatron.stand_in import use_cpu

        use_cpu()
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == tensor:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=dist.get_world_size() // tensor)


def seed(number: int = 1) -> None:
    """Set the same random numbers at the start of every case."""
    from megatron.core import tensor_parallel

    torch.manual_seed(number)
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(number)


def make_config(shape: Shape, layers: int, mode: Mode, *, fusion: bool) -> Any:
    """Return the TransformerConfig of a Llama-shaped model."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    cuda, tensor = torch.cuda.is_available(), parallel_state.get_tensor_model_parallel_world_size()
    dtype = torch.bfloat16 if cuda else torch.float32
    return TransformerConfig(
        num_layers=layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        cp_comm_type="dfa" if mode.checkpoint is not None else "a2a" if shape.hybrid else "p2p",
        kv_channels=shape.head_dim,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=cuda,
        use_cpu_initialization=not cuda,
        # Compiled by PyTorch, without Apex or Transformer Engine; the other fusions need one of them.
        bias_activation_fusion=fusion and cuda,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if mode.full else None,
        recompute_method="uniform" if mode.full else None,
        recompute_num_layers=1 if mode.full else None,
        fp8="hybrid" if mode.fp8 else None,
        fp8_recipe="tensorwise",
        **(_hybrid_fields(shape, transformer_engine=mode.transformer_engine) if shape.hybrid else {}),
    )


def make_spec(config: Any, mode: Mode, options: MegatronConfig | None) -> Any:
    """Megatron's spec with Transformer Engine or without, and ours in it; options None leaves it as it is."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from dfa_megatron.megatron.replace import replace
    from dfa_megatron.megatron.spec import bearing_sequence_parallelism, distribute_attention

    if config.linear_attention_freq:
        spec = _hybrid_spec(config, transformer_engine=mode.transformer_engine)
    elif mode.transformer_engine:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        replace(WrappedTorchNorm, "__new__", bearing_sequence_parallelism)  # Megatron's norms of PyTorch refuse it
    return spec if options is None else distribute_attention(spec, config, config=options)


def gpt_model(config: Any, spec: Any, vocabulary: int, length: int, **more: Any) -> Any:
    """Return a GPTModel whose head has weights of its own."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=length,
        share_embeddings_and_output_weights=False,
        **more,
    )


def _hybrid_fields(shape: Shape, *, transformer_engine: bool) -> dict[str, Any]:
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


def _hybrid_spec(config: Any, *, transformer_engine: bool) -> Any:
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


def _hybrid_kernels() -> bool:
    """Return whether Megatron found the kernels of gated delta nets (fla-core)."""
    from megatron.core.ssm import gated_delta_net

    return bool(gated_delta_net.HAVE_FLA)
