"""The block `dist_flash_attention` of DeepSpeed's JSON, read strictly: DeepSpeed ignores keys it does not know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.deepspeed.refusals import BLOCK
from dfa_megatron.huggingface.refusals import MODEL
from dfa_megatron.names import nearest

KEY = "dist_flash_attention"
"""The top-level key of the block."""

_OWN = ("enabled", "size", "reentrant", "selfcheck")
_OPTIONS = tuple(spec.name for spec in DistAttentionConfig.options("deepspeed"))

_HELP = {
    "enabled": "Distribute attention. Without the block DeepSpeed is called as it is.",
    "size": "Ranks that share a sequence; they are consecutive, and their number divides that of all ranks. Left out: "
    "sequence_parallel_size if that key is there, else all ranks.",
    "reentrant": "Checkpoint a Hugging Face model's layers with PyTorch's re-entrant form. activation_checkpointing's "
    "cpu_checkpointing, which keeps their inputs on the host, always does.",
    "selfcheck": "Before the engine is made, compare many ranks with one on rank 0's CPU, with a small model of this "
    "configuration; a difference ends the run with a table.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """Hold the JSON's block. The other options are common to all frameworks: see `DistAttentionConfig`.

    Raises:
        UnsupportedError: a value is of the wrong type or not among its choices; the nearest known one is named.
    """

    enabled: bool = True
    size: int | None = None
    reentrant: bool = False
    selfcheck: bool = False
    options: DistAttentionConfig = field(default_factory=DistAttentionConfig)

    def __post_init__(self) -> None:
        for name in ("enabled", "reentrant", "selfcheck"):
            value = getattr(self, name)
            BLOCK.check(no_bool=None if type(value) is bool else f"{name}={value!r}")
        no_number = self.size is not None and (type(self.size) is not int or self.size < 1)
        BLOCK.check(wrong_size=repr(self.size) if no_number else None)
        MODEL.check(self.options, reentrant=self.reentrant)
        self.options.refuse_outside("deepspeed", "leaving it out")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DeepSpeedOptions:
        """Read the block; an unknown key is an error that names the nearest known one."""
        BLOCK.check(no_block=None if isinstance(values, Mapping) else repr(values))
        known = _OWN + _OPTIONS
        for key in values:
            BLOCK.check(unknown_key=None if key in known else str(key), nearest=nearest(key, known))
        own = {key: value for key, value in values.items() if key in _OWN}
        shared = {key: value for key, value in values.items() if key in _OPTIONS}
        return cls(**own, options=DistAttentionConfig.from_mapping(shared))

    @classmethod
    def enabled_in(cls, settings: Mapping[str, Any]) -> DeepSpeedOptions | None:
        """The block of DeepSpeed's configuration, None if it has none or one that is not enabled."""
        block = cls.from_mapping(settings[KEY]) if KEY in settings else None
        return block if block is not None and block.enabled else None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """A JSON schema (draft 2020-12) of a DeepSpeed file with the block in it; the other keys are DeepSpeed's."""
        shared = DistAttentionConfig.json_schema("deepspeed")
        own = {
            "enabled": {"type": "boolean", "default": True, "description": _HELP["enabled"]},
            "size": {"type": "integer", "minimum": 1, "description": _HELP["size"]},
            "reentrant": {"type": "boolean", "default": False, "description": _HELP["reentrant"]},
            "selfcheck": {"type": "boolean", "default": False, "description": _HELP["selfcheck"]},
        }
        block = {"type": "object", "additionalProperties": False, "properties": {**own, **shared["properties"]}}
        return {
            "$schema": shared["$schema"],
            "title": "DeepSpeed configuration with dfa_megatron's distributed attention",
            "type": "object",
            "properties": {KEY: block},
        }


if (
    __name__ == "__main__"
):  # python -m dfa_megatron.deepspeed.json_block > configs/deepspeed/dist_flash_attention.schema.json
    print(json.dumps(DeepSpeedOptions.json_schema(), indent=2))
