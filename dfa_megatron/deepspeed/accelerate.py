"""Write the JSON's block where accelerate hands DeepSpeed its configuration, for `distribute_accelerator`."""

from __future__ import annotations

import dataclasses
from typing import Any

from dfa_megatron.config import TrainingConfig
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.tested_keys import check_sizes
from dfa_megatron.errors import UnsupportedError


def block_of(accelerator: Any, size: int | None, config: TrainingConfig | None, *, unlisted: bool) -> DeepSpeedOptions:
    """Return the block of the JSON, or one of the arguments, with the ranks that share a sequence; and write it.

    The sizes of batches in the JSON count groups then, not ranks.

    Raises:
        UnsupportedError: both give a size, or options, and differ.
    """
    plugin, world = accelerator.state.deepspeed_plugin, accelerator.state.num_processes
    settings = plugin.deepspeed_config
    given = DeepSpeedOptions(options=TrainingConfig.of(config))
    block = DeepSpeedOptions.enabled_in(settings) or given
    check_sizes("size", size, block.size)
    check_sizes("sequence_parallel_size", settings.get("sequence_parallel_size"), size)
    if config is not None and block.options != given.options:
        raise UnsupportedError(
            "config beside the block dist_flash_attention of DeepSpeed's JSON", "they differ", "one of them"
        )
    size = size or block.size or settings.get("sequence_parallel_size") or world
    block = dataclasses.replace(block, size=size, unlisted=unlisted or block.unlisted)
    if world % size == 0:
        _write(plugin, block, world)
    return block


def _write(plugin: Any, block: DeepSpeedOptions, world: int) -> None:
    # Without defaults, such as "auto", which accelerate would want to fill in.
    written = {
        spec.name: getattr(own, spec.name)
        for own in (block, block.options)
        for spec in dataclasses.fields(own)
        if spec.name != "options" and getattr(own, spec.name) != spec.default
    }
    for settings in (plugin.deepspeed_config, plugin.hf_ds_config.config):
        settings[KEY] = written
        counts = [settings.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
        if all(isinstance(count, int) for count in counts):
            micro, accumulated = counts
            if settings.get("train_batch_size") == micro * accumulated * world:
                settings["train_batch_size"] = micro * accumulated * world // block.size
