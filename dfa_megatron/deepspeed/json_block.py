"""The block `dist_flash_attention` of DeepSpeed's JSON, read strictly: DeepSpeed ignores keys it does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from dfa_megatron.config import TrainingConfig
from dfa_megatron.deepspeed.tested_keys import check_sizes
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checkpointing import check_options

KEY = "dist_flash_attention"
"""The top-level key of the block."""


def keys_like_ours(settings: Mapping[str, Any]) -> list[str]:
    """Return the top-level keys that are the block's, or that may be meant for it, such as dist_flash_atention."""
    letters = {str(key): re.sub("[^a-z]", "", str(key).lower()) for key in settings}
    ours = re.sub("[^a-z]", "", KEY)
    return [
        key
        for key, name in letters.items()
        if ours in name or name.startswith(("distflash", "dfa")) or get_close_matches(ours, [name], cutoff=0.8)
    ]


def _key(default: Any, description: str) -> Any:
    """Declare a key of the block."""
    kind = {"type": "integer", "minimum": 1} if default is None else {"type": "boolean", "default": default}
    return field(default=default, metadata=kind | {"description": description})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """Hold the JSON's block. The other options are common to all frameworks: see `TrainingConfig`.

    Raises:
        UnsupportedError: a value is of the wrong type or not among its choices; the nearest known one is named.
    """

    enabled: bool = _key(True, "Distribute attention. Without the block DeepSpeed is called as it is.")
    size: int | None = _key(
        None,
        "Ranks that share a sequence; they are consecutive, and their number divides that of all ranks. Left out: "
        "sequence_parallel_size if that key is there, else all ranks.",
    )
    reentrant: bool = _key(
        False,
        "Checkpoint a Hugging Face model's layers with PyTorch's re-entrant form. activation_checkpointing's "
        "cpu_checkpointing, which keeps their inputs on the host, always does.",
    )
    unlisted: bool = _key(
        False,
        "Take a Hugging Face model whose type, class or layers no test compared with one process; then use `prove`.",
    )
    prove: bool = _key(
        False,
        "When the engine is made, compare its ranks with each rank alone on a short random text: loss, outputs of "
        "layers and gradients; a difference ends the run with a table. Less than a minute.",
    )
    options: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        for name, about in self._own().items():
            value = getattr(self, name)
            if about["type"] == "boolean" and type(value) is not bool:
                asked = f"dist_flash_attention.{name}={value!r}"
                raise UnsupportedError(asked, "it must be of type bool", "true or false")
        size = self.size
        if size is not None and (type(size) is not int or size < 1):
            asked = f"dist_flash_attention.size={size!r}"
            raise UnsupportedError(asked, "it must be a number of ranks", "for example 8")
        check_options(self.options, reentrant=self.reentrant)

    @classmethod
    def _own(cls) -> dict[str, dict[str, Any]]:
        """Return the schemas of the keys that only this block has."""
        return {spec.name: dict(spec.metadata) for spec in fields(cls) if spec.metadata}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DeepSpeedOptions:
        """Read the block.

        Raises:
            UnsupportedError: a key is unknown (the nearest known one is named), or of another framework.
        """
        if not isinstance(values, Mapping):
            asked = f"dist_flash_attention={values!r}"
            raise UnsupportedError(asked, "it must be a block", '{"enabled": true, "size": 8}')
        own = cls._own()
        options = TrainingConfig.from_mapping(values, beside=own)
        return cls(**{key: value for key, value in values.items() if key in own}, options=options)

    @classmethod
    def enabled_in(cls, settings: Mapping[str, Any]) -> DeepSpeedOptions | None:
        """Return the enabled block of DeepSpeed's configuration, or None.

        Raises:
            UnsupportedError: the block is wrong, or a key is misspelled so that DeepSpeed would ignore it, also one
                beside a right block.
        """
        for misspelled in keys_like_ours(settings):
            if misspelled != KEY:
                raise UnsupportedError(
                    f"the key {misspelled} in DeepSpeed's JSON",
                    "DeepSpeed would ignore it, and what it asks for",
                    "dist_flash_attention, once",
                )
        block = cls.from_mapping(settings[KEY]) if KEY in settings else None
        return block if block is not None and block.enabled else None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return a JSON schema (draft 2020-12) of a DeepSpeed file with the block; other keys are left to DeepSpeed."""
        shared = TrainingConfig.json_schema()
        properties = cls._own() | shared["properties"]
        block = {"type": "object", "additionalProperties": False, "properties": properties}
        return {
            "$schema": shared["$schema"],
            "title": "DeepSpeed configuration with dfa_megatron's distributed attention",
            "type": "object",
            "properties": {KEY: block},
        }


def block_of(accelerator: Any, size: int | None, config: TrainingConfig | None, *, unlisted: bool) -> DeepSpeedOptions:
    """Return the block of the JSON, or one of the arguments, with the ranks that share a sequence; and write it.

    It is written where accelerate hands DeepSpeed its configuration, for `distribute_accelerator`. The sizes of batches
    in the JSON count groups then, not ranks.

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
    block = replace(block, size=size, unlisted=unlisted or block.unlisted)
    if world % size == 0:
        _write(plugin, block, world)
    return block


def _write(plugin: Any, block: DeepSpeedOptions, world: int) -> None:
    # Without defaults, such as "auto", which accelerate would want to fill in.
    written = {
        spec.name: getattr(own, spec.name)
        for own in (block, block.options)
        for spec in fields(own)
        if spec.name != "options" and getattr(own, spec.name) != spec.default
    }
    for settings in (plugin.deepspeed_config, plugin.hf_ds_config.config):
        settings[KEY] = written
        counts = [settings.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
        if all(isinstance(count, int) for count in counts):
            micro, accumulated = counts
            if settings.get("train_batch_size") == micro * accumulated * world:
                settings["train_batch_size"] = micro * accumulated * world // block.size
