"""Steps of Megatron-Core that nobody drew: models by name, and what their ranks are asked for."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.fuzz.frameworks.uneven import MASKS
from tests.megatron.hybrids import THREEFOLD

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}
FOUR = {"num_layers": 4}
PER_TOKEN = {"calculate_per_token_loss": True}
LOCAL = {"transformer_impl": "local"}
"""FSDP2 otherwise believes that linear layers are to be sharded by themselves, inside layers that are."""
WHOLE_NORMS = {"sequence_parallel": False}
"""Norms that are PyTorch's bear no sequence parallelism."""

_SPARSE = {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 64}
ALLTOALL = {**_SPARSE, "moe_token_dispatcher_type": "alltoall"}
ALLGATHER = {**_SPARSE, "moe_token_dispatcher_type": "allgather"}
UNBALANCED = {**ALLGATHER, "moe_router_load_balancing_type": "none"}
REPLAYED = {**UNBALANCED, "moe_layer_freq": 1, "moe_enable_routing_replay": True}
OVERLAPPED = {**ALLTOALL, "overlap_moe_expert_parallel_comm": True, "bf16": True, "moe_aux_loss_coeff": 0.1}
BALANCED = {
    **ALLGATHER, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3, 0.2], "moe_z_loss_coeff": 0.1,
}  # fmt: skip
BIASED = {
    **ALLGATHER, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
    "qk_layernorm": True, "num_query_groups": None, "rope_type": "rope",
}  # fmt: skip
YARN = {
    **LATENT, "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 12,
    "mscale": 0.7, "mscale_all_dim": 0.3,
}  # fmt: skip
WINDOWS = {"window_size": (7, 0)}
THREE_OF_FOUR = {**FOUR, "window_size": (21, 0), "window_attn_skip_freq": 4}
BY_LIST = {"window_size": (5, 0), "window_attn_skip_freq": [1, 0]}
LEARNABLE = {"softmax_type": "learnable"}
OFF_BY_ONE = {"softmax_type": "off-by-one", "window_size": (9, 0), "window_attn_skip_freq": 2}
TWO_AHEAD = {"mtp_num_layers": 2}
SQUARE = {"linear_value_head_dim": 4, "linear_num_value_heads": 2}
"""As many and as wide heads of keys as of values, which Kimi's attention wants."""
BOUNDED = {"kda_safe_gate": True, "kda_lower_bound": -1.0}
STACK_AHEAD = {"num_layers": 3, **({"mtp_num_layers": 1} if find_spec("megatron.core.models.hybrid") else {})}
"""Prediction layers that are stacks, from Megatron-Core 0.19 on."""


def _block(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    plain = {"no_op": False, "replace_with_linear": False}
    return {
        "attention": {**plain, "n_heads_in_group": None, **attention},
        "ffn": {**plain, "ffn_mult": None, "intermediate_size": None, **ffn},
    }


_BLOCKS = [
    _block({"no_op": True}, {"intermediate_size": 96}),
    _block({"n_heads_in_group": 2}, {"intermediate_size": 128}),
    _block({"replace_with_linear": True}, {"no_op": True}),
    _block({"n_heads_in_group": 4}, {"replace_with_linear": True}),
]
HETEROGENEOUS = {
    **FOUR,
    "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": _BLOCKS}),
    "heterogeneous_block_specs": True,
}
"""Layers with a config of their own, some without attention or MLP."""

ROWS, TREE, MASK = {"pack": "rows"}, {"pack": "tree"}, {"pack": "mask"}
TRAINS = {"warm": 1, "optimizer": "torch"}
TRAINS_IN_PACKS = {**TRAINS, "dtype": "float64 beside float32"}
"""Rotary tables are in float32, and one rank's count through all documents, which Adam's steps make larger."""
MEGATRONS = {"warm": 1, "optimizer": "megatron", "dtype": "float32 of few layers"}
SPREAD = {**MEGATRONS, "optimizer": "distributed"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}), "one group": ({"num_query_groups": 1}, {}), "norms": ({"qk_layernorm": True}, {}),
    "experts": (ALLGATHER, {}), "alltoall": (ALLTOALL, TRAINS), "balanced": (BALANCED, {"padding_mask": True}),
    "balanced per token": (BALANCED | PER_TOKEN, {"padding_mask": True}), "biased": (BIASED, TRAINS),
    "latent": (LATENT, {}), "yarn": (YARN, {}), "packed yarn": (YARN, ROWS), "packed latent": (LATENT, ROWS),
    "packed": ({}, ROWS), "windows": (WINDOWS, {}), "mixed": (THREE_OF_FOUR, {}), "packed windows": (WINDOWS, ROWS),
    "packed mixed": (BY_LIST, ROWS), "learnable": (LEARNABLE, {}), "packed learnable": (LEARNABLE, ROWS),
    "off by one": (OFF_BY_ONE, {}), "heterogeneous": (HETEROGENEOUS, {}), "ahead": (TWO_AHEAD, {}),
    "ahead per token": (TWO_AHEAD | PER_TOKEN, {}), "packed ahead": (TWO_AHEAD, ROWS),
    "packed ahead per token": (TWO_AHEAD | PER_TOKEN, ROWS), "tree": (BY_LIST, TREE), "tree latent": (LATENT, TREE),
    "tree yarn": (YARN, TREE), "tree experts": ({**ALLGATHER, **LEARNABLE}, TREE), "mask": ({}, MASK),
    "mask balanced": (BALANCED | PER_TOKEN, MASK),
    "padded": ({**PER_TOKEN, "window_size": (9, 0), "window_attn_skip_freq": 2}, {"pack": "padded"}),
    "padded latent": (PER_TOKEN | LATENT, {"pack": "padded"}),
    "padded experts": ({**PER_TOKEN, **UNBALANCED, "moe_aux_loss_coeff": 0.0}, {"pack": "padded"}),
    "padded ahead": (TWO_AHEAD | PER_TOKEN, {"pack": "padded"}), "packed experts": (UNBALANCED, ROWS),
    "delta": ({**ALLGATHER, "moe_layer_freq": 1}, {"layers": "delta"}),
    "packed delta": ({}, {"layers": "delta", **ROWS}), "padded delta": ({}, {"layers": "delta", "pack": "padded"}),
    "tree delta": ({}, {"layers": "delta", **TREE}), "stack": ({"num_layers": 5}, {"layers": "M*-MG"}),
    "packed stack": ({"num_layers": 5}, {"layers": "M*-MG", **ROWS}),
    "padded stack": ({"num_layers": 5}, {"layers": "M*-MG", "pack": "padded"}),
    "stack by steps": ({"num_layers": 5, "use_mamba_mem_eff_path": False}, {"layers": "M*-MG"}),
    "stack of six groups": ({"num_layers": 5, **THREEFOLD}, {"layers": "M*-M*"}),
    "stack ahead": (STACK_AHEAD, {"layers": "M*M/M*"}), "tree stack": ({"num_layers": 3}, {"layers": "M*-", **TREE}),
    "mask stack": ({"num_layers": 3}, {"layers": "*-*", **MASK}),
    "tree learned": ({"num_layers": 3}, {**TREE, "model": {"position_embedding_type": "learned_absolute"}}),
    "images": ({"mrope_section": [4, 2, 2]}, {"model": {"position_embedding_type": "mrope"}}),
}  # fmt: skip
"""Of each its config beside that of `like`, and the fields of a draw. Equal names have equal data."""
for _pack in ("rows", "padded", "mask"):
    MODELS[f"{_pack} of images"] = (MODELS["images"][0], {**MODELS["images"][1], "pack": _pack})
MODELS |= {
    "kimi": (SQUARE, {"layers": "kimi"}), "packed kimi": (SQUARE | BOUNDED, {"layers": "kimi", **ROWS}),
    "padded kimi stack": ({"num_layers": 4, **SQUARE}, {"layers": "MK*K", "pack": "padded"}),
    "replayed": (REPLAYED, {"routing": "replay"}), "packed replayed": (REPLAYED, {"routing": "replay", **ROWS}),
    "recorded": (REPLAYED, {"routing": "record"}), "overlapped": (OVERLAPPED, {}),
    "packed overlapped": (OVERLAPPED, ROWS),
}  # fmt: skip


def _of_each_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Repeat what is listed for two layers, where there are more."""
    listed = {name: config.get(name) for name in ("moe_layer_freq", "window_attn_skip_freq")}
    return config | {name: x * (config["num_layers"] // 2) for name, x in listed.items() if isinstance(x, list)}


def like(
    name: str,
    sizes: dict[str, Any] | None = None,
    layout: str = "contiguous",
    checkpoint: str = "none",
    *,
    config: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> MegatronDraw:
    """Return a step of the model of that name, on ranks of these sizes, with more of its config, options and fields.

    It has two micro-batches where several ranks or stages have them, their documents differ, or weights move.
    """
    given, fields = MODELS[name]
    number = list(MODELS).index(name)
    sizes = sizes or {}
    base = {
        "num_layers": 4 if "pp" in sizes else 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
        "ffn_hidden_size": 128, "add_bias_linear": False, "normalization": "RMSNorm",
        "sequence_parallel": "ahead" not in name,
    }  # fmt: skip
    model = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False, **fields.get("model", {})}
    asked = {"data_layout": layout, "checkpoint": checkpoint, **(options or {})}
    several = len(sizes) > 1 or {"dp", "pp", "pack", "warm"} & {*sizes, *fields, *how}
    masks = tuple(MASKS[(number + more) % len(MASKS)] for more in ((0, 3) if several else (3,)))
    # Where ranks meet in the middle of a row, and not of one pack and the next, documents lie on both.
    rows = 3 if fields.get("pack") in ("rows", "padded") and sizes.get("cp", 1) % 2 == 0 else 2
    changes: dict[str, Any] = {"masks": masks, "batch": rows, **fields, **how, "model": model, "options": asked}
    changes["micro_batches"] = len(changes["masks"]) // sizes.get("dp", 1)
    said = f"{name}: {sizes} {layout} {checkpoint} {config or ''} {options or ''} {how or ''}"
    fields_of_config = _of_each_layer({**base, **given, **(config or {})})
    return MegatronDraw(number=number, name=said, config=fields_of_config, **sizes, **changes)
