"""Shrink a transformers config, without changing the work of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

HEAD, HIDDEN, FFN, VOCABULARY, LAYERS, EXPERTS = 16, 64, 96, 96, 8, 8
"""Head dimension, width, width of MLPs, vocabulary, layers and experts, where a config's are more."""
LEAST_WINDOW = 5
"""A window is no shorter."""
_WIDTHS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_dim",
    "n_inner", "ffn_hidden_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    "hidden_size_per_layer_input", "q_lora_rank", "kv_lora_rank",
)  # fmt: skip
_HEADS = ("head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk")
_INDICES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs")
"""Lists of layers, where other lists have an entry for each layer."""
_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_interval")
"""Numbers after which a layer of another kind comes."""
_FIRSTS = ("first_k_dense_replace", "attn_layer_offset", "expert_layer_offset")
"""Numbers of the first layer of another kind."""
_LEFT_OUT = ("quantization_config", "auto_map", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
STATE_EPS = 1e-2
"""Of norms: a state that few tokens have filled is small, and a smaller eps would enlarge its rounding."""
MOST = 8
"""Heads of a state space."""
_SIZES = (
    "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_chunk_size",
    "ssm_state_size", "chunk_size",
)  # fmt: skip
_STATE_HEADS = {"mamba_n_heads": "mamba_d_head", "mamba_num_heads": "mamba_head_dim", "n_mamba_heads": "mamba_headdim"}
"""Heads of a state space, and their width."""
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_EPS = ("layer_norm_epsilon", "norm_eps", "rms_norm_eps")


class Small:
    """Hold a configuration as a dictionary; `names` has an entry's own name by its common one, where they differ."""

    def __init__(self, values: dict[str, Any], names: Mapping[str, str]) -> None:
        self.values, self.names = values, names

    def get(self, name: str) -> Any:
        """Return the entry, or None."""
        return self.values.get(self.names.get(name, name))

    def set(self, name: str, value: Any) -> None:
        """Change an entry that is there."""
        key = self.names.get(name, name)
        if key in self.values:
            self.values[key] = value

    def most(self, *names: str, most: int) -> None:
        """Bound numbers."""
        for name in names:
            if type(given := self.get(name)) is int and given > most:
                self.set(name, most)


def shrink(config: Any, length: int) -> dict[str, Any]:
    """Return the config of the small model, in its class's form, for sequences of that length."""
    small = Small(config.to_dict(), type(config).attribute_map)
    small.values = {key: value for key, value in small.values.items() if key not in _LEFT_OUT}
    _heads(small)
    small.most(*_WIDTHS, most=FFN)
    if {"linear_attention", "conv", "hybrid", "hybrid_sliding"} & {*(getattr(config, "layer_types", None) or ())}:
        _states(small)
    _experts(small)
    _layers(small)
    _words(small)
    _window(small, length)
    return small.values


def _heads(small: Small) -> None:
    """Take two key/value heads where there are more, at the ratio of the user's."""
    heads = small.get("num_attention_heads")
    groups = small.get("num_key_value_heads") or heads
    ratio = heads // groups
    few = min(2, groups)
    width = small.get("head_dim")
    axes = (small.get("rope_parameters") or small.get("rope_scaling") or {}).get("mrope_section")
    head = HEAD if not axes else 2 * sum(axes)
    if width:
        small.set("hidden_size", min(small.get("hidden_size"), few * ratio * max(1, HIDDEN // (few * ratio))))
    else:
        small.set("hidden_size", few * ratio * min(head, small.get("hidden_size") // heads))
    small.set("num_attention_heads", few * ratio)
    small.set("num_key_value_heads", few)
    small.most("num_global_key_value_heads", most=few)
    small.most(*_HEADS, "rotary_dim", most=head)
    small.set("attention_hidden_size", 2 * small.get("hidden_size"))
    if small.get("word_embed_proj_dim"):
        small.set("word_embed_proj_dim", small.get("hidden_size"))


def _experts(small: Small) -> None:
    chosen = max((small.get(name) or 0 for name in _CHOSEN), default=0)
    small.most(*_EXPERTS, most=max(EXPERTS, chosen, 2 * (small.get("n_group") or 0)))


def _layers(small: Small) -> None:
    """Keep one period of the kinds of layers; the first of each kind where the period is long."""
    count: int = small.get("num_hidden_layers") or len(small.get("layer_types"))
    values = small.values
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == count and name not in _INDICES
    }
    own = {int(key): value for key, value in (values.get("per_layer_config") or {}).items()}

    def kind(layer: int) -> tuple[str, ...]:
        members = (str(layer in (values.get(name) or ())) for name in _INDICES)
        return (*(str(entries[layer]) for entries in lists.values()), *members, str(own.get(layer)))

    first: dict[tuple[str, ...], int] = {}
    for layer in range(count):
        first.setdefault(kind(layer), layer)
    steps = [small.get(name) for name in _STEPS]
    counted = [step for step in steps if type(step) is int] + [1 + (small.get(name) or 0) for name in _FIRSTS]
    needed = max(2, 1 + max(first.values()), *counted)
    chosen = list(range(min(count, needed))) if needed <= LAYERS else sorted({0, 1, *first.values()})
    if small.get("num_kv_shared_layers"):
        small.set("num_kv_shared_layers", len(chosen))
        chosen = 2 * chosen
    for name, entries in lists.items():
        values[name] = [entries[layer] for layer in chosen]
    for name in _INDICES:
        if values.get(name):
            values[name] = [new for new, layer in enumerate(chosen) if layer in values[name]]
    if own:
        bounded = {k: {n: min(v, 2 * HEAD) if n == "head_dim" else v for n, v in e.items()} for k, e in own.items()}
        values["per_layer_config"] = {f"{i:02d}": bounded[layer] for i, layer in enumerate(chosen) if layer in own}
    small.set("num_hidden_layers", len(chosen))


def _words(small: Small) -> None:
    small.most("vocab_size", "vocab_size_per_layer_input", most=VOCABULARY)
    words = small.get("vocab_size")
    for name, value in small.values.items():
        if name.endswith("_token_id") and value is not None:
            small.values[name] = value if type(value) is int and value < words else words - 1


def _window(small: Small, length: int) -> None:
    """Keep the window at the same share of the tokens, and no shorter than a few."""
    if type(window := small.get("sliding_window")) is not int or window < 1:
        return
    whole = small.get("max_position_embeddings") or length
    part = round(window * length / whole) if window < whole else length
    small.set("sliding_window", min(window, max(LEAST_WINDOW, part)))


def _states(small: Small) -> None:
    """Bound the sizes of states, with two key heads at the ratio of value heads to them; call it after `hidden_size`.

    The product of heads and width stays what a config's other entries say it is.
    """
    small.most(*_SIZES, most=HEAD)
    for name in _EPS:
        small.set(name, STATE_EPS)
    small.most("linear_num_heads", most=2)
    if keys := small.get("linear_num_key_heads"):
        few = min(2, keys)
        small.set("linear_num_value_heads", few * small.get("linear_num_value_heads") // keys)
        small.set("linear_num_key_heads", few)
    for heads, width in _STATE_HEADS.items():
        if not (small.get(heads) and small.get(width)):
            continue
        said = small.get("mamba_d_ssm")
        if small.get("mamba_expand") and not said:
            inner = small.get("mamba_expand") * small.get("hidden_size")
            small.set(width, math.gcd(HEAD, inner))
            small.set(heads, inner // small.get(width))
        else:
            small.most(heads, most=MOST)
            small.most(width, most=HEAD)
            small.set("mamba_d_ssm", said and small.get(heads) * small.get(width))
        for name in _GROUPS:
            if groups := small.get(name):
                small.set(name, math.gcd(min(2, groups), small.get(heads)))
