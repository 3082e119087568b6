"""Every option of the project, once: flags, JSON schema and the documentation's tables are generated from here."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import add_flags, from_flags
from dfa_megatron.names import (
    CHECKPOINT,
    DATA_LAYOUTS,
    KERNELS,
    NUMERICS,
    SCHEDULES,
    TRANSPORTS,
    VERIFY,
    nearest,
    plain,
)

PREFIX = "dfa_"
"""Of an option's name on a namespace; its flag begins with `--dfa-`."""


class Numbers(NamedTuple):
    """An option takes numbers from 1, beside its choices if it has some. Dynamo traces tuples, no dataclasses."""

    why: str
    instead: str


RANKS = Numbers("it is a number of ranks", "1, which exchanges nothing, more, or 'auto'")
TOKENS = Numbers("it is a number of tokens", "4096, another number from 1, or 'off'")


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None, numbers: Numbers | None = None) -> Any:
    """Declare a field."""
    # A parser may set another default than ours.
    shown: dict[str, Any] = {"help": f"{help} Default: %(default)s."}
    if choices:
        shown |= {"metavar": f"{{{','.join(choices)},1,2,...}}"} if numbers else {"choices": choices}
    about = {"help": help, "choices": choices, "numbers": numbers, "flag": shown}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistAttentionConfig:
    """The options of distributed attention: how it is computed, not which mathematics it computes.

    Raises:
        UnsupportedError: a value has the wrong type, is out of range or is unknown; the nearest known one is named.
    """

    rules: ClassVar[tuple[tuple[Any, ...], ...]]
    """Name, default, choices and numbers of each option: Dynamo of PyTorch 2.6 traces tuples, no mappings of fields."""

    schedule: str = _option(
        "auto",
        "Who computes which block at which step, on contiguous tokens. ring: every rank computes its own rows. "
        "balanced: DISTFLASHATTN as published. balanced_shared: the same with the idle slot of an even number of ranks "
        "filled. greedy: helpers take work by area, for packed documents. auto: the cheapest of those that the mask "
        "and the layout allow; on other layouts every rank computes its own rows, and auto is the only value.",
        SCHEDULES,
    )
    ulysses_degree: int | str = _option(
        "auto",
        "Number of neighbouring ranks that exchange heads for tokens, all-to-all, around the schedule. The schedule "
        "then runs over the ranks divided by it, with the heads divided by it. It must divide both; kv heads that "
        "several ranks need are copied. 1: no exchange. auto: by link, ranks and tokens. That is more than 1 over slow "
        "links and for short slices of 8 ranks or more; 1 for packed documents, windows, masks and named schedules.",
        ("auto",),
        numbers=RANKS,
    )
    kernel: str = _option(
        "auto", "Which kernel computes a block. auto: the fastest that can do the request on this device.", KERNELS
    )
    transport: str = _option(
        "auto",
        "How messages move between ranks. p2p: sends and receives of NCCL, or of gloo on a CPU. copy_engine: the GPUs' "
        "copy engines write into each other's memory, which takes no multiprocessor from the kernel; all ranks on one "
        "host. auto: copy_engine where every rank can reach every other's memory, CUDA_DEVICE_MAX_CONNECTIONS is not 1 "
        "and an attention's messages need no more than 5 GiB, which it keeps between calls; else p2p.",
        TRANSPORTS,
    )
    verify: str = _option(
        "on",
        "Ranks compare what they run. on: everything about every new plan, then the number and a digest of every call, "
        "and a thread watches over the group: ranks that differ, have ended or do not answer are named. off: nothing "
        "is compared, and ranks that differ give wrong numbers or wait without end.",
        VERIFY,
    )
    numerics: str = _option(
        "fastest",
        "The order in which partial results merge. fastest: as they come, so that the last bits depend on the ranks. "
        "invariant: in a fixed tree over chunks of each document, so that the bits are the same on any number of "
        "ranks, by any schedule, layout and transport, and for a document alone or in any pack.",
        NUMERICS,
    )

    def __new__(cls, **given: Any) -> Self:
        """Refuse options that there are not, before `__init__` would without a hint."""
        cls._refuse_unknown("the option", given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, default, choices, numbers in self.rules:
            if (value := plain(getattr(self, name))) is not getattr(self, name):
                object.__setattr__(self, name, value)
            _check(f"{name}={value!r}", value, default, choices, numbers)

    @classmethod
    def of(cls, given: Self | None) -> Self:
        """Return the options that a caller gave, or the defaults for None.

        Raises:
            UnsupportedError: they are not of this class.
        """
        if given is not None and type(given) is not cls:
            what, instead = f"config={given!r}", f"{cls.__name__}(...), or {cls.__name__}.from_mapping(...)"
            raise UnsupportedError(what, f"it must be a {cls.__name__}", instead)
        return cls() if given is None else given

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], beside: Collection[str] = ()) -> Self:
        """Build from a mapping (JSON, YAML), whose keys `beside` are no options and mean something else.

        Raises:
            UnsupportedError: a key is unknown (the nearest known one is named), of another class, or its value wrong.
        """
        cls._refuse_unknown("the key", values, beside)
        return cls(**{key: value for key, value in values.items() if key not in beside})

    @classmethod
    def _refuse_unknown(cls, what: str, given: Iterable[str], beside: Collection[str] = ()) -> None:
        known = (*beside, *(spec.name for spec in fields(cls)))
        for name in given:
            if name not in known:
                whose = [kind.__name__ for kind in CONFIGS if name in kind.__dataclass_fields__]
                why = f"it is an option of {' and '.join(whose)} alone" if whose else "no option has that name"
                instead = "leaving it out here" if whose else _WENT.get(name) or nearest(name, known)
                raise UnsupportedError(f"{what} {name!r}", why, instead)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one argument group with a flag `--dfa-name` for every field."""
        add_flags(parser.add_argument_group("dfa", "distributed attention (dfa_megatron)"), cls, PREFIX)
        parser.set_defaults(**{PREFIX + spec.name: spec.default for spec in fields(cls)})
        return parser

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Read the fields that `add_arguments` put on a namespace; a field whose flag is missing keeps its default."""
        return from_flags(cls, args, PREFIX)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return a JSON schema (draft 2020-12) of the mapping that `from_mapping` takes."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "dfa_megatron distributed attention",
            "type": "object",
            "additionalProperties": False,
            "properties": {spec.name: _property(spec) for spec in fields(cls)},
        }

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @property
    def fixed_degree(self) -> int:
        """`ulysses_degree` where it is a number; 1 for "auto"."""
        return 1 if isinstance(self.ulysses_degree, str) else self.ulysses_degree


_WENT = {
    "head_stages": "q.chunk, k.chunk, v.chunk and a call for each: docs/remat.md",
    "hardware": "schedule and ulysses_degree by name",
}
"""Options that went, and what works in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(DistAttentionConfig):
    """The options of a framework: those of attention, and what else this package does for its layers and loss."""

    checkpoint: str = _option(
        "auto",
        "Activation checkpointing of whole layers. auto: where the framework checkpoints them, attention's output and "
        "lse are saved, so that it runs and sends once. none: the framework's checkpoints run attention twice. full: "
        "layers are checkpointed, and attention runs twice. remat: layers are checkpointed, and attention's output and "
        "lse are saved.",
        CHECKPOINT,
    )
    remat_offload: bool = _option(
        False,
        "Keep what checkpointing saves in pinned host memory until the recompute takes it: each layer's input; with "
        "rematerialization, attention's output and lse too. The copies run beside the computation.",
    )
    loss_tile: int | str = _option(
        "off",
        "Compute the loss in pieces of this many tokens, so that the full logits are never stored. Log-probabilities "
        "and gradients are made so too; the backward makes the logits again. 4096 is enough for speed. off: the "
        "framework's loss, with the logits of all tokens.",
        ("off",),
        TOKENS,
    )

    @property
    def checkpoints_layers(self) -> bool:
        """Whether this package checkpoints layers, whatever the framework does."""
        return self.checkpoint in ("full", "remat")

    @property
    def saves_attention(self) -> bool:
        """Whether a checkpoint of a layer saves attention's output and lse."""
        return self.checkpoint in ("auto", "remat")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig(TrainingConfig):
    """The options in Megatron, whose batches are sliced before they reach the model."""

    data_layout: str = _option(
        "contiguous",
        "Which tokens a rank holds. contiguous: one slice, in order (this package slices the data). boundary: the "
        "framework's data stay zigzag, and tokens come in order where they enter the model. zigzag: the framework's "
        "data stay zigzag and attention works on them as they are.",
        DATA_LAYOUTS,
    )

    @property
    def layout_inside(self) -> str:
        """The tokens of a rank inside Megatron's layers, as the functions' `layout` says it."""
        return "contiguous" if self.data_layout == "boundary" else self.data_layout


CONFIGS = DistAttentionConfig, TrainingConfig, MegatronConfig


def _property(spec: Field[Any]) -> dict[str, Any]:
    """A field as a JSON schema has it."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    about = {"default": spec.default, "description": spec.metadata["help"]}
    choices = list(spec.metadata["choices"] or ())
    if choices and spec.metadata["numbers"]:
        return {"anyOf": [{"enum": choices}, {"type": "integer", "minimum": 1}], **about}
    return {"type": names[type(spec.default)], **about, **({"enum": choices} if choices else {})}


def _check(what: str, value: Any, default: Any, choices: tuple[str, ...] | None, numbers: Numbers | None) -> None:
    """Refuse a value that a field cannot have."""
    kind: Any = int if choices and numbers and type(value) is int else type(default)
    if choices and kind is str and value not in choices:
        instead = nearest(value, choices) if numbers is None else numbers.instead
        raise UnsupportedError(what, "there is no such value", instead)
    if type(value) is not kind:
        raise UnsupportedError(what, f"it must be of type {kind.__name__}", f"for example {default!r}")
    if numbers and kind is not str and value < 1:
        raise UnsupportedError(what, numbers.why, numbers.instead)


for _config in CONFIGS:
    _config.rules = tuple((s.name, s.default, s.metadata["choices"], s.metadata["numbers"]) for s in fields(_config))
