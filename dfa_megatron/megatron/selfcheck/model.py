"""Build the small model on a rank, with weights that depend on their names alone, and locate each part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig


@dataclass(frozen=True, slots=True)
class Parallel:
    """Hold the parallel sizes and the token layout; for the whole model all sizes are 1 and attention is Megatron's."""

    tp: int
    pp: int
    cp: int
    vp: int | None
    options: DistAttentionConfig | None
    """None: Megatron's own attention, on one rank."""


def start(parallel: Parallel) -> None:
    """Make Megatron's process groups over the default one."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(parallel.tp, parallel.pp, parallel.vp, context_parallel_size=parallel.cp)
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def config_of(settings: Mapping[str, Any], parallel: Parallel, **changes: Any) -> Any:
    """Return the TransformerConfig of the settings for these parallel sizes."""
    from megatron.core import activations
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = dict(settings["config"])
    functions = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    if (name := fields.pop("activation_func", None)) is not None:
        fields["activation_func"] = functions.get(name) or getattr(activations, name)
    if isinstance(window := fields.get("window_size"), list):
        fields["window_size"] = tuple(window)
    fields.update(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vp,
        context_parallel_size=parallel.cp,
        sequence_parallel=bool(fields.get("sequence_parallel")) and parallel.tp > 1,
        cp_comm_type=fields.get("cp_comm_type") if parallel.options is not None else None,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # gloo's isend may still read an output that Megatron has already given back.
        deallocate_pipeline_outputs=parallel.vp is None,
        overlap_p2p_comm=parallel.vp is not None,
        batch_p2p_comm=parallel.vp is None,
    )
    fields.update(changes)
    multi_latent = fields.get("multi_latent_attention")
    return (MLATransformerConfig if multi_latent else TransformerConfig)(**fields)


def build(settings: Mapping[str, Any], config: Any, parallel: Parallel) -> list[Any]:
    """Return this rank's model chunks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from dfa_megatron.megatron.spec import distribute_attention

    model, training = settings["model"], settings["training"]
    chunks = []
    for stage in range(parallel.vp) if parallel.vp else [None]:
        spec = _spec(config, stage, one=parallel.options is None)
        if parallel.options is not None:
            spec = distribute_attention(spec, config, config=parallel.options, vp_stage=stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=training["vocabulary"],
            max_sequence_length=training["tokens"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=not model["untie_embeddings_and_output_weights"],
            position_embedding_type=model["position_embedding_type"],
            rotary_percent=model["rotary_percent"],
            rotary_base=model["rotary_base"],
            rope_scaling=model["use_rope_scaling"],
            rope_scaling_factor=model["rope_scaling_factor"],
            seq_len_interpolation_factor=model["rotary_seq_len_interpolation_factor"],
            vp_stage=stage,
        )
        for name, parameter in chunk.named_parameters():
            parameter.data.copy_(_weight(global_name(chunk, name), parameter, config))
        chunks.append(chunk)
    return chunks


def _spec(config: Any, stage: int | None, *, one: bool) -> Any:
    """Megatron's own spec, with its own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import multi_latent_attention

    if config.num_moe_experts:
        spec: Any = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
        )
        layers = spec.layer_specs
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
        layers = [spec]
    if config.multi_latent_attention:
        # Megatron has no attention for values of another width than the keys without Transformer Engine.
        if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
            vars(multi_latent_attention)["HAVE_TE"] = False
        if one:
            for layer in layers:
                layer.submodules.self_attention.submodules.core_attention = DenseAttention
    return spec


class DenseAttention(torch.nn.Module):
    """Causal attention with all scores in memory, for the one-rank model of multi-latent attention."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(seq, batch, heads, width) each; the result is (seq, batch, heads * width of the values)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scores = q @ k.mT * (self.scale or query.shape[-1] ** -0.5)
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def global_name(chunk: Any, name: str) -> str:
    """Return a parameter's name with the layer's number in the whole model, counted from 0."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    tied = chunk.share_embeddings_and_output_weights and name == "output_layer.weight"
    return "embedding.word_embeddings.weight" if tied else ".".join(parts)


def places_of(name: str, parameter: torch.Tensor, config: Any) -> tuple[tuple[int, ...], dict[int, torch.Tensor]]:
    """Return a whole parameter's shape, and the rows or columns that this tensor-parallel rank holds."""
    from megatron.core import parallel_state

    shape, tp = list(parameter.shape), config.tensor_model_parallel_size
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tuple(shape), {}
    dimension: int = parameter.partition_dim  # type: ignore[attr-defined]
    rank = parallel_state.get_tensor_model_parallel_rank()
    shape[dimension] *= tp
    # A gated MLP's first projection is two, gate and value, and each is cut by itself.
    parts = 2 if config.gated_linear_unit and "linear_fc1" in name else 1
    held = [part.chunk(tp)[rank] for part in torch.arange(shape[dimension]).chunk(parts)]
    return tuple(shape), {dimension: torch.cat(held)}


def _weight(name: str, parameter: torch.Tensor, config: Any) -> torch.Tensor:
    """The initial value: the whole parameter is made from its name, and cut as this rank's is."""
    shape, places = places_of(name, parameter, config)
    generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))
    whole = torch.randn(shape, generator=generator) * (0.3 if "embedding" in name else 0.1)
    if "norm" in name and name.endswith("weight"):
        whole += 1
    for dimension, rows in places.items():
        whole = whole.index_select(dimension, rows)
    return whole
