"""Read the flags of Megatron's scripts without Megatron's parser, which not every megatron-core wheel has.

A flag is a field of TransformerConfig by its name, or has a line in a table below, or is left out and named.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.refusals import ARGS, LAUNCH, SELFCHECK, check_config
from dfa_megatron.megatron.selfcheck.known_flags import FUSED_OFF, NO_PART
from dfa_megatron.megatron.start.dfa_flags import add_dfa_arguments
from dfa_megatron.names import nearest

_TO_CONFIG: dict[str, dict[str, Any]] = {
    "apply_layernorm_1p": {"layernorm_zero_centered_gamma": True},
    "disable_bias_linear": {"add_bias_linear": False},
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "quick_geglu": {"gated_linear_unit": True, "activation_func": "quick_gelu"},
    "squared_relu": {"activation_func": "squared_relu"},
}
"""Flags without a value that set fields of TransformerConfig of other names."""

_RENAMED = {
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "te_rng_tracker": "use_te_rng_tracker",
}
"""Flags with a value whose field of TransformerConfig has another name."""

_MODEL: dict[str, Any] = {
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "untie_embeddings_and_output_weights": False,
    "use_rotary_position_embeddings": False,
}
"""Flags of the model that are not in its TransformerConfig, with Megatron's defaults."""

_TRAINING: dict[str, Any] = {
    "seq_length": None,
    "max_position_embeddings": None,
    "micro_batch_size": 1,
    "vocab_size": None,
    "group_query_attention": False,
    "spec": None,
    "yaml_cfg": None,
    "global_batch_size": None,
    "optimizer": "adam",
    "lr": None,
    "adam_eps": 1e-8,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "sgd_momentum": 0.9,
    "ddp_bucket_size": None,
    "grad_reduce_in_bf16": False,
    "accumulate_allreduce_grads_in_fp32": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "sft": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "dataloader_inter_document_masking": False,
    "create_attention_mask_in_dataloader": True,
    "use_torch_fsdp2": False,
    "use_megatron_fsdp": False,
    "use_legacy_models": False,
    "attention_backend": None,
    "bf16": False,
    "fp16": False,
}
"""Flags that say how the model is trained, with Megatron's defaults."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Hold the user's flags, sorted."""

    config: Mapping[str, Any]
    """Fields of TransformerConfig (MLATransformerConfig) that are given; the activation by name."""
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    options: DistAttentionConfig
    off: tuple[str, ...]
    """Flags that switch something off: "no_rope_fusion"."""
    unknown: tuple[str, ...]
    """Flags that nobody here knows."""


def read(words: Sequence[str]) -> Asked:
    """Sort flags into what makes the model, what trains it and our options, and refuse what the package refuses.

    Raises:
        UnsupportedError: a needed flag is missing, one of ours is unknown, or the combination is refused.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parsed, rest = add_dfa_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(
        list(words)
    )
    options = DistAttentionConfig.from_args(parsed)
    kinds = {spec.name: str(spec.type) for spec in fields(MLATransformerConfig)}
    config: dict[str, Any] = {}
    model, training, off, unknown = dict(_MODEL), dict(_TRAINING), [], []
    for name, values in _flags(rest):
        field = _RENAMED.get(name, name)
        negative = name.removeprefix("no_") if name.startswith("no_") else ""
        if name in model:
            model[name] = _value(values)
        if name in training:
            training[name] = list(values) if name == "spec" else _value(values)
        elif negative in training:
            training[negative] = False
        if name in _TO_CONFIG:
            config.update(_TO_CONFIG[name])
        elif field in kinds:
            config[field] = _field(field, kinds[field], values)
        elif negative in kinds:
            config[negative] = False
            off.append(name)
        elif name in FUSED_OFF:
            off.append(name)
        elif name not in model and name not in training and negative not in training and name not in NO_PART:
            unknown.append("--" + name.replace("_", "-"))
    if not training["group_query_attention"] and not config.get("multi_latent_attention"):
        config.pop("num_query_groups", None)
    if not config.get("multi_latent_attention"):
        config = {
            name: value for name, value in config.items() if name in {spec.name for spec in fields(TransformerConfig)}
        }
    if model["use_rotary_position_embeddings"]:
        model["position_embedding_type"] = "rope"
    for flag in unknown:
        SELFCHECK.check(unknown_flag=flag if "-dfa-" in flag else None, nearest=nearest(flag, _own_flags()))
    if pattern := pattern_of(model):
        config["num_layers"] = len(pattern)
    asked = Asked(config, model, training, options, tuple(off), tuple(unknown))
    _check(asked)
    return asked


def pattern_of(model: Mapping[str, Any]) -> str:
    """Return the letters of a hybrid's layers, without pipeline stages and prediction layers; "" for a GPT."""
    pattern = model["hybrid_layer_pattern"] or model["hybrid_override_pattern"] or ""
    return str(pattern).partition("/")[0].replace("|", "")


def _flags(words: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            SELFCHECK.check(stray_word=word)
    return [(name, tuple(values)) for name, values in found]


def _own_flags() -> list[str]:
    return ["--dfa-" + spec.name.replace("_", "-") for spec in DistAttentionConfig.options("megatron")]


def _field(name: str, kind: str, values: tuple[str, ...]) -> Any:
    if name == "window_size":
        numbers = [int(part) for value in values for part in value.strip("()[] ").split(",") if part.strip()]
        return numbers if len(numbers) == 2 else numbers[0]
    if name.endswith("_freq"):
        return _pattern(name, values)
    if "list[" in kind.lower() and name not in ("cp_comm_type", "pipeline_model_parallel_layout"):
        many = [_value((value,)) for value in values]
        return many if len(many) > 1 or "Union" not in kind else many[0]
    return _value(values)


def _value(values: tuple[str, ...]) -> Any:
    """True for a flag alone; a number where it is one."""
    if not values:
        return True
    for number in (int, float):
        try:
            return number(values[0])
        except ValueError:
            continue
    return values[0]


def _pattern(name: str, values: tuple[str, ...]) -> int | list[int]:
    """`3`, or a list of ones and zeros as an expression of lists, sums and repetitions: ([0]+[1]*3)*2."""

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [read(element) for element in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = read(node.left), read(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError

    said = " ".join(values)
    found: int | list[int] = 0
    try:
        found = read(ast.parse(said, mode="eval").body)
    except (ValueError, SyntaxError, TypeError):
        SELFCHECK.check(no_pattern=f"--{name.replace('_', '-')} {said}")
    return found


def _check(asked: Asked) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    given = {spec.name: spec.default for spec in fields(MLATransformerConfig)} | {"kv_lora_rank": None}
    config, training = {**given, **asked.config}, asked.training
    sizes = {name: config.get(name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    for name, size in {**sizes, "seq_length": training["seq_length"]}.items():
        SELFCHECK.check(missing_flag=None if isinstance(size, int) else f"--{name.replace('_', '-')}")
    check_config(config, asked.options)
    ARGS.check(asked.config, training, asked.options)
    # In a patched clone --cp-comm-type dfa means the default model with this attention; see start/clone.py.
    spec = training["spec"] or (["dfa_megatron.megatron"] if config["cp_comm_type"] == "dfa" else None)
    LAUNCH.check(training, spec=spec, launched=True)
