"""Build a small GPTModel on a rank, with weights that depend on their names alone, and locate each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from dfa_megatron.config import MegatronConfig
from dfa_megatron.megatron.spec import distribute_attention
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.support.models import noise


def config_of(given: Mapping[str, Any], drawn: MegatronDraw, **changes: Any) -> Any:
    """Return the TransformerConfig of these fields for the sizes of a draw; `changes` override all."""
    fields = {
        "cp_comm_type": "dfa" if drawn.options is not None else None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **given,
        "tensor_model_parallel_size": drawn.tp,
        "pipeline_model_parallel_size": drawn.pp,
        "virtual_pipeline_model_parallel_size": drawn.vp,
        "context_parallel_size": drawn.cp,
        "expert_model_parallel_size": drawn.ep,
        "sequence_parallel": bool(given.get("sequence_parallel")) and drawn.tp > 1,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        # gloo's isend may still read an output that Megatron has already given back.
        "deallocate_pipeline_outputs": drawn.vp is None,
        "overlap_p2p_comm": drawn.vp is not None,
        "batch_p2p_comm": drawn.vp is None,
        **changes,
    }
    if "heterogeneous_layers_config_encoded_json" in fields:
        from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

        return HeterogeneousTransformerConfig(**fields)
    latent = fields.get("multi_latent_attention") or "kv_lora_rank" in fields
    return (MLATransformerConfig if latent else TransformerConfig)(**fields)


def build_chunk(config: Any, options: MegatronConfig | None, stage: int | None, **model: Any) -> Any:
    """Return a chunk of GPTModel, with the attention of `options` or, where None, Megatron's own.

    `stage` is that of a virtual pipeline. `model` has arguments of GPTModel.
    """
    spec = megatrons_spec(config, stage, dense=options is None)
    if options is not None:
        spec = distribute_attention(spec, config, config=options)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
        **model,
    )
    set_weights(chunk)
    return chunk


def megatrons_spec(config: Any, stage: int | None = None, *, dense: bool = False) -> Any:
    """Return Megatron's own spec without Transformer Engine; of the whole block where some layers have experts.

    `dense` gives multi-latent attention a dense core, because Megatron has none for it without Transformer Engine.
    """
    spec: Any
    if config.heterogeneous_block_specs:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec

        return get_gpt_heterogeneous_layer_spec(config, vp_stage=stage)
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(
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
        # Megatron takes its own stand-in for Transformer Engine for the real one.
        if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
            vars(multi_latent_attention)["HAVE_TE"] = False
        if dense:
            for layer in layers:
                layer.submodules.self_attention.submodules.core_attention = DenseAttention
    return spec


class DenseAttention(torch.nn.Module):
    """Attention with all scores in memory, for the one-rank model of multi-latent attention."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """(seq, batch, heads, width) each, and which pairs may not meet, bool (1, 1, seq, seq).

        The result is (seq, batch, heads * width of the values).
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scores = (q @ k.mT * (self.scale or query.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def global_name(chunk: Any, name: str) -> str:
    """Return a parameter's name with the numbers of layer and expert in the whole model, counted from 0."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(chunk.decoder.layers[int(words[2])].layer_number - 1)
    if "local_experts" in words:
        place = words.index("local_experts") + 1
        experts = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
        words[place] = str(int(words[place]) + experts * parallel_state.get_expert_model_parallel_rank())
    tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
    return "embedding.word_embeddings.weight" if tied else ".".join(words)


def places_of(name: str, parameter: torch.Tensor, config: Any) -> tuple[tuple[int, ...], dict[int, torch.Tensor]]:
    """Return a whole parameter's shape, and the rows or columns that this tensor-parallel rank holds."""
    shape, tp = list(parameter.shape), config.tensor_model_parallel_size
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tuple(shape), {}
    dimension: int = parameter.partition_dim  # type: ignore[attr-defined]
    rank = parallel_state.get_tensor_model_parallel_rank()
    shape[dimension] *= tp
    # A gated MLP's first projection holds gate and value; each is cut on its own.
    halves = 2 if config.gated_linear_unit and "linear_fc1" in name else 1
    held = [half.chunk(tp)[rank] for half in torch.arange(shape[dimension]).chunk(halves)]
    return tuple(shape), {dimension: torch.cat(held)}


def set_weights(chunk: Any) -> None:
    """Make every parameter whole from its global name alone, large, and copy this rank's entries into the chunk."""
    for local_name, parameter in chunk.named_parameters():
        name = global_name(chunk, local_name)
        shape, places = places_of(name, parameter, chunk.config)
        whole = noise(name, shape) * (0.3 if "embedding" in name else 0.1)
        if "norm" in name and name.endswith("weight"):
            whole += 1
        elif name.endswith("A_log"):  # states that last for several tokens, so that what comes in matters
            whole -= 2
        for dimension, rows in places.items():
            whole = whole.index_select(dimension, rows)
        parameter.data.copy_(whole)


def mean_loss(reported: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor | None:
    """Return the mean loss of a global batch from totals and numbers of tokens; None before the last stage."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    total = torch.stack([entry["lm loss"] for entry in reported]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total[0] / total[1]
