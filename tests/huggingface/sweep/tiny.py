"""Build a tiny random model of each type that transformers has, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dfa_megatron.huggingface.check_model import TRIED
from dfa_megatron.runtime.environment import order_of
from tests.huggingface.sweep import images
from tests.huggingface.sweep.images import DELTA
from tests.support.models import with_noise
from tests.support.shrink import shrink

_DECODER = {"is_decoder": True}
_INDEX = {"index_topk": 8, "index_head_dim": 24, "index_n_heads": 4}
"""Few keys of many, and so few heads that some scores are equal."""
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
    "hidden_size": 32,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_blocks": 1,
    "ext_pj_hidden_size": 32,
}  # fmt: skip
_PLAIN = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
_HEADED = {**_PLAIN, "num_attention_heads": 4, "intermediate_size": 48}


def _each(kinds: Iterable[str], values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(kinds, values)


FIRST: dict[str, dict[str, Any]] = {
    **_each(
        ("bert", "bert-generation", "electra", "ernie", "megatron-bert", "rembert", "roc_bert", "roformer"), _DECODER
    ),
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1},
    **_each(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 16}),
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "xlm": {"causal": True},
    "phi4_multimodal": {"vision_config": {**_TOWER, "image_size": 28}, "audio_config": _TOWER},
    "git": {"vision_config": _TOWER},
}
"""What the configuration of a type is given, where its defaults make no decoder."""

THEN: dict[str, dict[str, Any]] = {
    "marian": {"decoder_vocab_size": 96}, **_each(("plbart", "whisper"), {"decoder_attention_heads": 4}),
    "xglm": {"use_cache": False}, "codegen": {"n_head": 4, "rotary_dim": 8},
    "llama4_text": {"attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.5},
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "bailing_hybrid": {"linear_head_dim": 8, "linear_num_heads": 2},
    "gpt_neo": {"window_size": 7},
    **_each(("dots1", "laguna", "mellum", "ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3"), {
        "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 7,
        "use_sliding_window": True,
    }),
    **_each(("axk2", "deepseek_v32", "hy_v4"), _INDEX),
    "glm_moe_dsa": {**_INDEX, "indexer_types": ["full", "shared", "full", "shared"]},
    "helium": {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
    **_each(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA),
    "falcon_h1": {
        "mamba_rms_norm": True, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    **_each(("ministral3", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"), {"sliding_window": 7}),
    "phi4_multimodal": {
        "vision_config": {**_TOWER, "image_size": 28}, "audio_config": _TOWER, "sliding_window": 7,
    },
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "gemma4_text": {
        "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3,
        "position_embedding_type": "rope",
    },
    **_each(("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hyperclovax"), {
        "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 1.5,
    }),
    **_each(("cohere", "glm4_moe"), {"use_qk_norm": True}), **_each(("phi", "stablelm"), {"qk_layernorm": True}),
    **_each(("olmo", "olmoe"), {"clip_qkv": 0.5}),
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 2, "q_lora_rank": 16},
}  # fmt: skip
"""What the small configuration is given, where `shrink` leaves it large or at odds with itself, and where released
checkpoints have what the defaults leave out."""

_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "head_dim": 16, "v_head_dim": 8}
_STATES = {**_PLAIN, "state_size": 8}

OWN: dict[str, dict[str, Any]] = {
    "mamba": _STATES, "falcon_mamba": _STATES,
    "mamba2": {**_STATES, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16}, "rwkv": _PLAIN,
    "xlstm": {**_PLAIN, "hidden_size": 64, "num_heads": 4, "chunk_size": 4, "mode": "train"},
    "prophetnet": {
        **{f"num_{part}_layers": 2 for part in ("encoder", "decoder")},
        **{f"num_{part}_attention_heads": 4 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}, **_DECODER, "is_encoder_decoder": False,
        "add_cross_attention": False, "vocab_size": 96, "hidden_size": 32,
    },
    "xlnet": {
        "vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_head": 8, "d_inner": 48, "attn_type": "uni",
    },
    "reformer": {
        **_DECODER, "vocab_size": 96, "hidden_size": 32, "axial_pos_embds": False, "num_attention_heads": 2,
        "attention_head_size": 16, "feed_forward_size": 48, "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 10, "lsh_attn_chunk_length": 10, "num_buckets": 4, "hash_seed": 1,
    },
    "longcat_flash": {
        **_PLAIN, "num_layers": 1, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8, "moe_topk": 2, "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    "nemotron_h": {
        **_HEADED, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_key_value_heads": 2, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "dbrx": {
        "vocab_size": 96, "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blt": {
        "vocab_size": 96, **{f"{part}_config": _HEADED for part in ("patcher", "encoder", "decoder", "global")},
        "encoder_hash_byte_group_vocab": 16,
    },
    "zamba": {
        **_HEADED, "num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4, "attn_layer_period": 3, "attn_layer_offset": 2, "n_mamba_heads": 2,
        "mamba_d_state": 8,
    },
    "zamba2": {
        **_HEADED, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "mamba_d_state": 8,
        "n_mamba_heads": 4, "chunk_size": 16, "num_mem_blocks": 2, "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    },
    "dots3_note_text": {
        **_HEADED, "num_hidden_layers": 4, "num_key_value_heads": 4, "pad_token_id": 0, "moe_intermediate_size": 16,
        **{f"{part}{name}": size for part in ("", "swa_") for name, size in _LATENT.items()},
        **_INDEX, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "qk_rope_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "sliding_window": 7,
    },
    "dory": {
        **_HEADED, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "n_input_layers": 1,
        "n_output_layers": 1, "sliding_window": 7, "initializer_range": 0.3,
    },
    "qwen4_exp_text": {
        **_HEADED, **DELTA, "num_hidden_layers": 4, "ple_layer_ids": [1], "ple_embed_dim": 16, "eos_token_id": 2,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64,
        "hc_lowrank": 8, "split_ngram_parts": 2,
    },
}  # fmt: skip
"""The whole configuration of types without heads of attention, or with several stacks."""


NOT_RUN = {
    "gemma3n": "transformers needs timm to build it; its language model is gemma3n_text",
    "moss_transcribe_diarize": "its images are sound, which the batches here have not",
    **_each(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model, whose keys and values it is given"
    ),
    **_each(
        (
            *("biogpt", "camembert", "data2vec-text", "opt", "roberta", "roberta-prelayernorm", "xlm-roberta"),
            *("xlm-roberta-xl", "xmod"),
        ),
        "its table of positions ends at 2,048 tokens or before",
    ),
}
"""Types that make no model alone, and why."""


_SINCE_5_24 = {"codegen", "gptj"}
"""Types whose layers took no attention implementations before, and are refused there."""


def tried_here() -> list[str]:
    """Return the types of the list that the installed transformers has, and in which it takes attentions."""
    import transformers

    older = order_of(transformers.__version__) < order_of("5.24.0")
    return [kind for kind in TRIED if kind in transformers.CONFIG_MAPPING and not (older and kind in _SINCE_5_24)]


def built_as(kind: str) -> str:
    """Return the type that the configuration of a type's model names."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if kind in images.WHOLE:
        return kind.split()[0]
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]].config_class.model_type
    return name


def layers_of(kind: str) -> list[str]:
    """Return the types of layers in the model of a type."""
    return sorted({*(getattr(build(kind).config.get_text_config(), "layer_types", None) or ())})


def build(kind: str) -> Any:
    """Return the model in float64, in training mode, without dropout; on the device `meta` if it has several parts."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if kind in images.WHOLE:
        return images.build(kind)
    config = CONFIG_MAPPING[kind](**OWN.get(kind, FIRST.get(kind, {})))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, model.config_class):
        kind = model.config_class.model_type
        config = model.config_class(**OWN.get(kind, FIRST.get(kind, {})))
    several = config.get_text_config(decoder=True).model_type != config.model_type
    if not several and kind not in OWN:
        config = type(config).from_dict({**shrink(config, 32), **THEN.get(kind, {})})
    for name in list(vars(config)):
        if ("drop" in name or name.endswith("noise")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    torch.manual_seed(7)
    with torch.device("meta" if several else "cpu"):
        made = model._from_config(config, attn_implementation="eager", experts_implementation="eager")
    return made if several else with_noise(made).double().train()
