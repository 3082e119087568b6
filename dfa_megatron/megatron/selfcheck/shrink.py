"""Shrink the model of the user's flags to laptop size, without changing the work of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dfa_megatron.megatron.refusals import SELFCHECK
from dfa_megatron.megatron.selfcheck.mamba_stacks import LETTERS, shortest
from dfa_megatron.megatron.selfcheck.read_flags import Asked, pattern_of, read
from dfa_megatron.megatron.selfcheck.switched_off import steps, switch_off
from dfa_megatron.selfcheck.case import TOLERANCE, Case, Reductions
from dfa_megatron.selfcheck.options import MOST_RANKS, on_cpu, unseen
from dfa_megatron.selfcheck.small import (
    EXPERTS,
    FFN,
    HEAD,
    HIDDEN,
    ROWS,
    STATE_EPS,
    STATE_TOLERANCE,
    VOCABULARY,
    Small,
    fewest_groups,
)

_PATTERNS = ("window_attn_skip_freq", "moe_layer_freq", "no_rope_freq", "linear_attention_freq")

_LAYOUT_OF_STAGES = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def case_of(flags: Sequence[str]) -> Case:
    """Return the self-check of a Megatron script's flags.

    Raises:
        UnsupportedError: the flags are refused by the package, or ask for what the check cannot run.
    """
    asked = read(flags)
    layers = ("context_parallel_size", "experimental_attention_variant", "linear_attention_freq")
    pattern = pattern_of(asked.model)
    others = "".join(sorted(set(pattern) - set(LETTERS)))
    SELFCHECK.check(
        asked.training,
        asked.options,
        hybrid_pattern=pattern,
        other_layers=others,
        **{name: asked.config.get(name) for name in layers},
    )
    reduced = Reductions()
    parallel = _parallel(asked, reduced)
    config = _config(asked, parallel, reduced)
    training = _training(asked, parallel, config, reduced)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    return Case(
        title=_title(asked, parallel),
        ranks=parallel["tp"] * parallel["pp"] * parallel["cp"],
        measure="dfa_megatron.megatron.selfcheck.train:measure",
        settings={
            "recompute": {name: config.pop(name, None) for name in names},
            "config": config,
            "model": {**asked.model, "pattern": shortest(pattern)},
            "training": training,
            "options": on_cpu(asked.options, "--dfa-", reduced),
            "parallel": parallel,
        },
        sections={"plain": "plain", "rematerialized": "plain", "three steps": "three steps"},
        reduced=reduced,
        unseen=_unseen(asked),
        tolerance=STATE_TOLERANCE if _has_states(asked) else TOLERANCE,
        facts={"context-parallel ranks of each attention": str(parallel["cp"])},
    )


def _has_states(asked: Asked) -> bool:
    return bool(asked.config.get("linear_attention_freq") or pattern_of(asked.model))


def _title(asked: Asked, parallel: Mapping[str, Any]) -> str:
    import megatron.core

    version = str(megatron.core.__version__).partition("+")[0]
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.items() if name == "cp" or (size or 1) > 1)
    o = asked.options
    return f"Megatron-Core {version}, {sizes}, layout {o.data_layout}, schedule {o.schedule}"


def _parallel(asked: Asked, reduced: Reductions) -> dict[str, Any]:
    c, t = asked.config, asked.training
    sizes: dict[str, int] = {
        "cp": c.get("context_parallel_size", 1),
        "tp": c.get("tensor_model_parallel_size", 1),
        "pp": c.get("pipeline_model_parallel_size", 1),
    }
    most = 1 if _has_states(asked) else 2  # heads of a mixer are not located in its weights
    run = {name: size if name == "cp" else min(size, most) for name, size in sizes.items()}
    for name in ("pp", "tp"):
        if run["cp"] * run["tp"] * run["pp"] > MOST_RANKS:
            run[name] = 1
    reduced.note("--tensor-model-parallel-size", sizes["tp"], run["tp"])
    reduced.note("--pipeline-model-parallel-size", sizes["pp"], run["pp"])
    if c.get("sequence_parallel") and run["tp"] == 1 < sizes["tp"]:
        reduced.note("--sequence-parallel", "on", "off: one tensor-parallel rank")
    layers, chunks = t["num_layers_per_virtual_pipeline_stage"], t["num_virtual_stages_per_pipeline_rank"]
    interleaved = layers or chunks
    if interleaved:
        said = f"{layers} layers each" if layers else chunks
        reduced.note("virtual stages of a pipeline rank", said, 2 if run["pp"] > 1 else "none")
    reduced.note("--expert-model-parallel-size", c.get("expert_model_parallel_size", 1), 1)
    return {**run, "vp": 2 if interleaved and run["pp"] > 1 else None}


def _config(asked: Asked, parallel: Mapping[str, Any], reduced: Reductions) -> dict[str, Any]:
    c = dict(asked.config)
    switch_off(asked, c, reduced)
    for name in _LAYOUT_OF_STAGES:
        if name in c:
            reduced.note(name, str(c.pop(name)), "equal stages")
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        c.pop(name, None)
    small = Small(c, reduced)
    _heads(asked, small, parallel)
    _sizes(small)
    _states(asked, small)
    _layers(asked, small, parallel)
    return c


def _heads(asked: Asked, small: Small, parallel: Mapping[str, Any]) -> None:
    """Take as few key/value heads as the parallel sizes need, at the ratio of the user's."""
    c, tp, degree = small.values, parallel["tp"], asked.options.fixed_degree
    heads = c["num_attention_heads"]
    groups = c.get("num_query_groups") or heads
    ratio = heads // groups
    # With copies of key/value heads on some ranks, as in the user's run, their number stays.
    copies = degree > 1 and groups // tp < degree
    few = groups if copies or groups % tp else fewest_groups(groups, ratio, degree, tp)
    small.reduced.note("heads and key/value heads", f"{heads}, {groups}", f"{few * ratio}, {few}")
    c["kv_channels"] = c.get("kv_channels") or c["hidden_size"] // heads
    c["num_attention_heads"] = few * ratio
    if c.get("num_query_groups"):
        c["num_query_groups"] = few
    small.most("kv_channels", most=HEAD)


def _sizes(small: Small) -> None:
    small.values.setdefault("ffn_hidden_size", 4 * small.values["hidden_size"])
    small.most("hidden_size", most=HIDDEN)
    small.most("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", most=FFN)
    small.most("qk_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", most=2 * HEAD)
    small.most("qk_pos_emb_head_dim", most=HEAD)
    small.most("num_moe_experts", most=max(EXPERTS, small.get("moe_router_topk") or 2))


def _states(asked: Asked, small: Small) -> None:
    """Make mixers small: delta nets get two key heads at the ratio of value heads to them, Mamba mixers two groups."""
    c = small.values
    c.pop("experimental_attention_variant", None)  # linear_attention_freq says where they are
    if _has_states(asked):
        small.reduced.note("layernorm_epsilon", c.get("layernorm_epsilon", 1e-5), STATE_EPS)
        c["layernorm_epsilon"] = STATE_EPS
    if "M" in pattern_of(asked.model):
        _mamba(small)
    if c.get("linear_attention_freq") or "G" in pattern_of(asked.model):
        _delta_nets(small)


def _mamba(small: Small) -> None:
    c = small.values
    for name, width, most in (("state_dim", 128, HEAD), ("head_dim", 64, HEAD), ("num_groups", 8, 2)):
        given = c.setdefault(f"mamba_{name}", width)  # Megatron's default
        small.set(f"mamba_{name}", min(given, most))
    small.most("mamba_num_heads", most=2 * c["mamba_num_groups"])


def _delta_nets(small: Small) -> None:
    c = small.values
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        width = c.get(name) or 128  # Megatron's default
        small.reduced.note(name, width, min(width, HEAD))
        c[name] = min(width, HEAD)
    keys, values = c.get("linear_num_key_heads") or 16, c.get("linear_num_value_heads") or 32
    few = min(2, keys)
    small.reduced.note("heads of delta nets", f"{keys}, {values}", f"{few}, {few * values // keys}")
    c["linear_num_key_heads"], c["linear_num_value_heads"] = few, few * values // keys


def _layers(asked: Asked, small: Small, parallel: Mapping[str, Any]) -> None:
    """Keep enough for every stage of the pipeline and for each kind of layer in the patterns."""
    c, chunks, needed = small.values, parallel["pp"] * (parallel["vp"] or 1), 2
    if letters := pattern_of(asked.model):
        whole = asked.model["hybrid_layer_pattern"] or asked.model["hybrid_override_pattern"]
        small.reduced.note("layers", whole, shortest(letters))
        c["num_layers"] = len(shortest(letters))
        return
    for pattern in (c.get(name) for name in _PATTERNS):
        if isinstance(pattern, int):
            needed = max(needed, pattern)
        elif isinstance(pattern, list) and pattern:
            needed = max(needed, 1 + max(pattern.index(kind) for kind in set(pattern)))
    few = min(c["num_layers"], chunks * math.ceil(max(needed, chunks) / chunks))
    for name in _PATTERNS:
        if isinstance(c.get(name), list):
            c[name] = c[name][:few]
    small.reduced.note("layers", c["num_layers"], few)
    c["num_layers"] = few


def _training(asked: Asked, parallel: Mapping[str, Any], config: dict[str, Any], reduced: Reductions) -> dict[str, Any]:
    t, cp, tp = dict(asked.training), parallel["cp"], parallel["tp"]
    whole = t["seq_length"]
    # The remainders that decide whether the sequence divides among ranks stay as they are.
    unit = math.lcm(2 * cp, cp * tp)
    short = min(whole, ROWS * unit // 2 + whole % unit)
    reduced.note("tokens", whole, short)
    if isinstance(window := config.get("window_size"), list) and window[0] > 0:
        left = max(1, round(window[0] * short / whole))
        if left != window[0]:
            reduced.note("window", window[0], f"{left}, the same part of the tokens")
        config["window_size"] = [left, window[1]]
    reduced.note("vocabulary", t["vocab_size"] or "the tokenizer's", VOCABULARY)
    for name in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if t[name]:
            reduced.note("--" + name.replace("_", "-"), "yes", "Megatron's DDP")
    return {**steps(t, parallel, reduced), "tokens": short, "vocabulary": VOCABULARY}


def _unseen(asked: Asked) -> list[str]:
    lines = unseen(asked.options)
    if _has_states(asked):
        lines.append("the kernels of mamba-ssm, causal-conv1d and FLA: loops over tokens stand in for them")
    if asked.unknown:
        lines.append("flags without a part in the check: " + " ".join(asked.unknown))
    return lines
