"""Make DeepSpeed's JSON run on a CPU: the ZeRO stage, clipping and the block stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.selfcheck.case import Reductions
from dfa_megatron.selfcheck.options import on_cpu
from dfa_megatron.selfcheck.train import ADAM_EPS

LEARNING_RATE, MOST = {"adam": 1e-2, "adamw": 1e-2, "sgd": 0.1}, 2
"""MOST: micro-batches of a step, and sequences of a micro-batch."""

_NAMES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
_OF_OPTIMIZERS = ("betas", "weight_decay", "adam_w_mode", "momentum", "nesterov")
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size")
_BUCKET = 100_000


def engine_settings(
    settings: Mapping[str, Any], block: DeepSpeedOptions, size: int, reduced: Reductions
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON of the engine that runs, and its optimizer as PyTorch's: the name and arguments of its class.

    Raises:
        UnsupportedError: an optimizer that was not tried.
    """
    for name in ("bf16", "bfloat16", "fp16"):
        if (settings.get(name) or {}).get("enabled"):
            reduced.note(name, "enabled", "float32")
    optimizer, arguments = _optimizer(settings, reduced)
    made: dict[str, Any] = {
        "optimizer": optimizer,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero(settings, reduced),
        "gradient_clipping": _number(settings, "gradient_clipping", 0.0, 1.0),
        KEY: {"enabled": True, "size": size, "reentrant": block.reentrant},
    }
    options = on_cpu(block.options, f"{KEY}.", reduced)
    made[KEY] |= {spec.name: options[spec.name] for spec in DistAttentionConfig.options("deepspeed")}
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        asked = _number(settings, name, 1, MOST)
        made[name] = min(MOST, asked)
        reduced.note(name, asked, made[name])
    for name in ("prescale_gradients", "gradient_predivide_factor"):
        if name in settings:
            made[name] = settings[name]
    section = dict(settings.get("activation_checkpointing") or {})
    if section.pop("cpu_checkpointing", False):
        reduced.note("activation_checkpointing.cpu_checkpointing", "true", "false, on a CPU")
    return made | ({"activation_checkpointing": section} if section else {}), arguments


def _number(settings: Mapping[str, Any], name: str, missing: Any, auto: Any) -> Any:
    """Return a number of the JSON; `auto`, which HF Trainer fills in, becomes one."""
    value = settings.get(name, missing)
    return auto if value == "auto" else value


def _zero(settings: Mapping[str, Any], reduced: Reductions) -> dict[str, Any]:
    kept: dict[str, Any] = {"stage": 0}
    for name, value in (settings.get("zero_optimization") or {}).items():
        path = f"zero_optimization.{name}"
        if name.startswith(("offload_", "cpu_offload")):
            device = value.get("device", "none") if isinstance(value, Mapping) else value
            if device and device != "none":
                reduced.note(path, device, "none, on a CPU")
        elif name in _BUCKETS:
            kept[name] = min(value, _BUCKET) if isinstance(value, int) else _BUCKET
            reduced.note(path, value, kept[name])
        elif value != "auto":
            kept[name] = value
    if kept["stage"] == 3:  # so that the small parameters are sharded as large ones are
        name = "stage3_param_persistence_threshold"
        reduced.note(f"zero_optimization.{name}", kept.get(name, "the default"), 64)
        kept[name] = 64
    return kept


def _optimizer(settings: Mapping[str, Any], reduced: Reductions) -> tuple[dict[str, Any], dict[str, Any]]:
    given = settings.get("optimizer")
    if given is None:
        reduced.note("optimizer", "of your script", "AdamW")
    kind = str((given or {}).get("type", "AdamW")).lower()
    if kind not in _NAMES:
        raise UnsupportedError(f"optimizer.type {kind!r} in a self-check", "it was not tried", "Adam, AdamW or SGD")
    params = (given or {}).get("params") or {}
    numbers = {name: params[name] for name in _OF_OPTIMIZERS if params.get(name, "auto") != "auto"}
    asked = f"{params.get('lr', 'the default')}" + (", its schedule" if "scheduler" in settings else "")
    reduced.note("learning rate", asked, f"{LEARNING_RATE[kind]} in each step")
    if kind != "sgd":
        reduced.note("eps of Adam", params.get("eps", 1e-8), ADAM_EPS)
    numbers |= {"lr": LEARNING_RATE[kind]} | ({} if kind == "sgd" else {"eps": ADAM_EPS})
    arguments = {name: value for name, value in numbers.items() if name != "adam_w_mode"}
    decoupled = kind == "adamw" or (kind == "adam" and numbers.get("adam_w_mode", True))
    engine = {"type": _NAMES[kind], "params": numbers | ({} if kind == "sgd" else {"torch_adam": True})}
    return engine, {"type": "AdamW" if decoupled else _NAMES[kind], "params": arguments}
