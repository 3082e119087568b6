"""Shrink the model of the user's flags to laptop size, without changing the work of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dfa_megatron.megatron.refusals import SELFCHECK
from dfa_megatron.megatron.selfcheck.read_flags import Asked, read
from dfa_megatron.megatron.selfcheck.switched_off import steps, switch_off
from dfa_megatron.selfcheck.case import Case, Reduction, Section
from dfa_megatron.selfcheck.options import MOST_RANKS, SECONDS_OF_A_RANK, on_cpu, unseen

ROWS, HEAD, HIDDEN, FFN, VOCABULARY, LAYERS = 16, 16, 64, 96, 96, 8
"""Tokens of a rank, head dimension, width, width of the MLP, vocabulary and layers, where the user's are larger."""

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
    SELFCHECK.check(asked.training, context_parallel_size=asked.config.get("context_parallel_size"))
    reduced: list[Reduction] = []
    parallel = _parallel(asked, reduced)
    config = _config(asked, parallel, reduced)
    training = _training(asked, parallel, config, reduced)
    options = on_cpu(asked.options, "--dfa-", reduced)
    recompute = {name: config.pop(name, None) for name in ("recompute_method", "recompute_num_layers")}
    settings = {
        "config": config,
        "model": dict(asked.model),
        "training": training,
        "options": options,
        "parallel": parallel,
        "recompute": {"recompute_granularity": config.pop("recompute_granularity", None), **recompute},
    }
    ranks = parallel["tp"] * parallel["pp"] * parallel["cp"]
    sections = (Section("plain", "plain"), Section("rematerialized", "plain"), Section("three steps", "three steps"))
    return Case(
        title=_title(asked, parallel),
        ranks=ranks,
        measure="dfa_megatron.megatron.selfcheck.train:measure",
        settings=settings,
        sections=sections,
        reduced=tuple(reduced),
        unseen=tuple(_unseen(asked)),
        facts={"context-parallel ranks of each attention": str(parallel["cp"])},
        timeout=max(300.0, SECONDS_OF_A_RANK * ranks),
    )


def _title(asked: Asked, parallel: Mapping[str, Any]) -> str:
    import megatron.core

    version = str(megatron.core.__version__).partition("+")[0]
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.items() if name == "cp" or (size or 1) > 1)
    o = asked.options
    return f"Megatron-Core {version}, {sizes}, layout {o.data_layout}, schedule {o.schedule}"


def _parallel(asked: Asked, reduced: list[Reduction]) -> dict[str, Any]:
    c, t = asked.config, asked.training
    sizes: dict[str, int] = {
        "cp": c.get("context_parallel_size", 1),
        "tp": c.get("tensor_model_parallel_size", 1),
        "pp": c.get("pipeline_model_parallel_size", 1),
    }
    run = {name: size if name == "cp" else min(size, 2) for name, size in sizes.items()}
    for name in ("pp", "tp"):
        if run["cp"] * run["tp"] * run["pp"] > MOST_RANKS:
            run[name] = 1
    for name, flag in (("tp", "--tensor-model-parallel-size"), ("pp", "--pipeline-model-parallel-size")):
        if run[name] != sizes[name]:
            reduced.append(Reduction(flag, str(sizes[name]), str(run[name])))
    if c.get("sequence_parallel") and run["tp"] == 1 < sizes["tp"]:
        reduced.append(Reduction("--sequence-parallel", "on", "off: one tensor-parallel rank"))
    layers, chunks = t["num_layers_per_virtual_pipeline_stage"], t["num_virtual_stages_per_pipeline_rank"]
    interleaved = layers or chunks
    if interleaved and (chunks != 2 or run["pp"] == 1):
        said = f"{layers} layers each" if layers else str(chunks)
        reduced.append(Reduction("virtual stages of a pipeline rank", said, "2" if run["pp"] > 1 else "none"))
    if (experts := c.get("expert_model_parallel_size", 1)) > 1:
        reduced.append(Reduction("--expert-model-parallel-size", str(experts), "1"))
    return {**run, "vp": 2 if interleaved and run["pp"] > 1 else None}


def _config(asked: Asked, parallel: Mapping[str, Any], reduced: list[Reduction]) -> dict[str, Any]:
    c = dict(asked.config)
    switch_off(asked, c, reduced)
    for name in (*_LAYOUT_OF_STAGES, "expert_model_parallel_size", "expert_tensor_parallel_size"):
        if name in c:
            value = c.pop(name)
            if name in _LAYOUT_OF_STAGES:
                reduced.append(Reduction(name, str(value), "equal stages"))
    _heads(asked, c, parallel, reduced)
    _sizes(c, reduced)
    _layers(c, parallel, reduced)
    return c


def _reduce(c: dict[str, Any], name: str, most: int, reduced: list[Reduction]) -> None:
    if (given := c.get(name)) is not None and given > most:
        reduced.append(Reduction(name, str(given), str(most)))
        c[name] = most


def _heads(asked: Asked, c: dict[str, Any], parallel: Mapping[str, Any], reduced: list[Reduction]) -> None:
    """As few key/value heads as the parallel sizes need, at the ratio of the user's."""
    heads = c["num_attention_heads"]
    groups = c.get("num_query_groups") or heads
    ratio = heads // groups
    degree = asked.options.fixed_degree
    few = next(
        n for n in range(1, groups + 1) if n >= min(2, groups) and n % parallel["tp"] == 0 and n * ratio % degree == 0
    ) if groups % parallel["tp"] == 0 else groups  # fmt: skip
    if degree > 1 and groups // parallel["tp"] < degree:
        few = groups  # some ranks hold copies of key/value heads, as in the user's run
    width = c.get("kv_channels") or c["hidden_size"] // heads
    if few != groups:
        reduced.append(Reduction("heads and key/value heads", f"{heads}, {groups}", f"{few * ratio}, {few}"))
    c["num_attention_heads"] = few * ratio
    if c.get("num_query_groups"):
        c["num_query_groups"] = few
    c["kv_channels"] = width
    _reduce(c, "kv_channels", HEAD, reduced)


def _sizes(c: dict[str, Any], reduced: list[Reduction]) -> None:
    c.setdefault("ffn_hidden_size", 4 * c["hidden_size"])
    _reduce(c, "hidden_size", HIDDEN, reduced)
    for name in ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        _reduce(c, name, FFN, reduced)
    for name in ("qk_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"):
        _reduce(c, name, 2 * HEAD, reduced)
    _reduce(c, "qk_pos_emb_head_dim", HEAD, reduced)
    if (experts := c.get("num_moe_experts")) and experts > 8:
        few = max(8, c.get("moe_router_topk", 2))
        reduced.append(Reduction("experts", str(experts), str(few)))
        c["num_moe_experts"] = few


def _layers(c: dict[str, Any], parallel: Mapping[str, Any], reduced: list[Reduction]) -> None:
    """Enough for every stage of the pipeline and for each kind of layer in the patterns."""
    asked = c["num_layers"]
    chunks = parallel["pp"] * (parallel["vp"] or 1)
    needed = 2
    for name in ("window_attn_skip_freq", "moe_layer_freq", "no_rope_freq"):
        pattern = c.get(name)
        if isinstance(pattern, int):
            needed = max(needed, pattern)
        elif isinstance(pattern, list) and pattern:
            needed = max(needed, 1 + max(pattern.index(kind) for kind in set(pattern)))
    few = min(asked, chunks * math.ceil(max(needed, chunks) / chunks))
    for name in ("window_attn_skip_freq", "moe_layer_freq", "no_rope_freq"):
        if isinstance(c.get(name), list):
            c[name] = c[name][:few]
    if few != asked:
        reduced.append(Reduction("layers", str(asked), str(few)))
    c["num_layers"] = few


def _training(
    asked: Asked, parallel: Mapping[str, Any], config: dict[str, Any], reduced: list[Reduction]
) -> dict[str, Any]:
    t, cp, tp = dict(asked.training), parallel["cp"], parallel["tp"]
    whole = t["seq_length"]
    # The remainders that decide whether the sequence divides among ranks stay as they are.
    unit = math.lcm(2 * cp, cp * tp)
    short = min(whole, ROWS * unit // 2 + whole % unit)
    if short != whole:
        reduced.append(Reduction("tokens", str(whole), str(short)))
    if isinstance(window := config.get("window_size"), list) and window[0] > 0:
        config["window_size"] = [max(1, round(window[0] * short / whole)), window[1]]
        if config["window_size"] != window:
            reduced.append(
                Reduction("window", str(window[0]), f"{config['window_size'][0]}, the same part of the tokens")
            )
    if (words := t["vocab_size"]) != VOCABULARY:
        reduced.append(Reduction("vocabulary", str(words or "the tokenizer's"), str(VOCABULARY)))
    for name in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if t[name]:
            reduced.append(Reduction("--" + name.replace("_", "-"), "yes", "Megatron's DDP"))
    return {**steps(t, parallel, reduced), "tokens": short, "vocabulary": VOCABULARY}


def _unseen(asked: Asked) -> list[str]:
    lines = unseen(asked.options)
    if asked.unknown:
        lines.append("flags without a part in the check: " + " ".join(asked.unknown))
    return lines
