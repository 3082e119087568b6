"""A DeepSpeed JSON with a small model, for `dfa-megatron prove deepspeed`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.proved_engine import prove
from dfa_megatron.deepspeed.tested_keys import check_settings, check_sizes
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.small.small_model import model_of, small_config
from dfa_megatron.proving import Proof
from dfa_megatron.proving.small_job import Reductions, SmallJob, on_cpu

_KEPT = (
    "activation_checkpointing", "gradient_clipping", "gradient_predivide_factor", "prescale_gradients",
    "train_micro_batch_size_per_gpu", "zero_optimization",
)  # fmt: skip
"""Keys that matter to what is compared; others are refused, or about logs, storage, dtypes and steps."""


def small_job(words: Sequence[str]) -> SmallJob:
    """Read a command line.

    Raises:
        UnsupportedError: the JSON, its block or the model is refused.
    """
    parser = argparse.ArgumentParser(prog="dfa-megatron prove deepspeed", allow_abbrev=False)
    parser.add_argument("settings", metavar="FILE.json", help="DeepSpeed's JSON with the block dist_flash_attention")
    parser.add_argument("--model", metavar="TYPE_OR_CONFIG", required=True, help="as in prove huggingface")
    parser.add_argument("--ranks", type=int, help="that share a sequence, if the JSON does not say it (2)")
    parser.add_argument(
        "--tokens", type=int, help="of your sequences, which a window is a part of; 48 a rank are checked"
    )
    args = parser.parse_args(list(words))
    try:
        given = json.loads(Path(args.settings).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedError(args.settings, f"it is no JSON: {error}", "DeepSpeed's configuration") from error
    block = DeepSpeedOptions.enabled_in(given) if isinstance(given, dict) else None
    if block is None:
        raise UnsupportedError(args.settings, f"it has no enabled block {KEY}", f'"{KEY}": {{"enabled": true, ...}}')
    said = block.size or given.get("sequence_parallel_size")
    check_sizes("--ranks", args.ranks, said)
    check_settings(given, said)
    reduced = Reductions()
    options = block.options.replace(**on_cpu(block.options, reduced))
    config, ranks = small_config(args.model, said or args.ranks or 2, options, args.tokens, reduced)
    settings = _settings(given, reduced)
    settings[KEY] = {**asdict(options), "enabled": True, "size": ranks, "reentrant": block.reentrant}

    def run() -> Proof:
        from dfa_megatron.deepspeed.initialize import initialize

        model = model_of(config)
        return prove(initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0])

    return SmallJob(ranks, reduced, run)


def _settings(given: Mapping[str, Any], reduced: Reductions) -> dict[str, Any]:
    """Return what of the JSON runs on a CPU, with an optimizer that never steps."""
    made = {key: given[key] for key in _KEPT if given.get(key, "auto") != "auto"}
    for key in ("bf16", "bfloat16", "fp16"):
        reduced.note(key, str(given.get(key)), "float32" if key in given else None)
    zero = {name: value for name, value in made.get("zero_optimization", {}).items() if value != "auto"}
    for name in [name for name in zero if "offload" in name]:
        reduced.note(f"zero_optimization.{name}", zero.pop(name), "none, on a CPU")
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size"):
        zero.pop(name, None)
    if zero.get("stage") == 3:  # so that the small parameters are sharded as large ones are
        zero["stage3_param_persistence_threshold"] = 64
    section = dict(made.get("activation_checkpointing", {}))
    if section.pop("cpu_checkpointing", False):
        reduced.note("activation_checkpointing.cpu_checkpointing", True, "off, on a CPU")
    reduced.note("gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1), 1)
    return {
        **made,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}},
        **({"activation_checkpointing": section} if section else {}),
    }
