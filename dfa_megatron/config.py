"""Every option of the project, once: flags, JSON schema and the documentation's tables are generated from here."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import add_flags, from_flags
from dfa_megatron.names import (
    CHECKPOINT,
    DATA_LAYOUTS,
    KERNELS,
    SCHEDULES,
    SCOPES,
    TRANSPORTS,
    VERIFY,
    nearest,
)


class Numbers(NamedTuple):
    """The numbers that an option takes; beside its choices, if it has some. Dynamo traces tuples, no dataclasses."""

    hold: Callable[[Any], bool]
    why: str
    instead: str


RANKS = Numbers(lambda n: n >= 1, "it is a number of ranks", "1, which exchanges nothing, more, or 'auto'")
STAGES = Numbers(lambda n: n >= 1, "it is a number of stages", "1, which runs all heads at once, or more")
TOKENS = Numbers(lambda n: n >= 1, "it is a number of tokens", "4096, another number from 1, or 'off'")


def _option(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    scope: tuple[str, ...] = SCOPES,
    numbers: Numbers | None = None,
) -> Any:
    """Declare a field. scope: where it can be set, some of SCOPES."""
    # A parser may set another default than ours.
    shown: dict[str, Any] = {"help": f"{help} Default: %(default)s."}
    if choices:
        shown |= {"metavar": f"{{{','.join(choices)},1,2,...}}"} if numbers else {"choices": choices}
    about = {"help": help, "choices": choices, "scope": scope, "numbers": numbers, "flag": shown}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistAttentionConfig:
    """The options of distributed attention: how it is computed, not which mathematics it computes.

    Raises:
        UnsupportedError: a value has the wrong type, is out of range or is unknown; the nearest known one is named.
    """

    schedule: str = _option(
        "auto",
        "Who computes which block at which step, on contiguous tokens. ring: every rank computes its own rows. "
        "balanced: DISTFLASHATTN as published. balanced_shared: the same with the idle slot of an even number of ranks "
        "filled. greedy: helpers take work by area, for packed documents. auto: the cheapest of those that the mask "
        "and the layout allow; on other layouts every rank computes its own rows, and auto is the only value.",
        SCHEDULES,
    )
    data_layout: str = _option(
        "contiguous",
        "Which tokens a rank holds. contiguous: one slice, in order (this package slices the data). boundary: the "
        "framework's data stay zigzag, and tokens come in order where they enter the model. zigzag: the framework's "
        "data stay zigzag and attention works on them as they are.",
        DATA_LAYOUTS,
        ("megatron",),
    )
    ulysses_degree: int | str = _option(
        "auto",
        "Number of neighbouring ranks that exchange heads for tokens, all-to-all, around the schedule. The schedule "
        "then runs over the ranks divided by it, with the heads divided by it. It must divide both; kv heads that "
        "several ranks need are copied. 1: no exchange. auto: the fastest in the planner's simulation, which is more "
        "than 1 over slow links and for short calls of many ranks; 1 for packed documents and for a named schedule.",
        ("auto",),
        numbers=RANKS,
    )
    head_stages: int = _option(
        1,
        "Number of stages in which an attention runs its heads, one after another. Memory for received rows, partial "
        "results and float32 gradients is divided by it; the same bytes are sent in as many more messages. It must "
        "divide the kv heads of a rank. For the longest sequences.",
        numbers=STAGES,
    )
    kernel: str = _option(
        "auto", "Which kernel computes a block. auto: the fastest that can do the request on this device.", KERNELS
    )
    checkpoint: str = _option(
        "auto",
        "Activation checkpointing of whole layers. auto: where the framework checkpoints them, attention's output and "
        "lse are saved, so that it runs and sends once. none: the framework's checkpoints run attention twice. full: "
        "layers are checkpointed, and attention runs twice. remat: layers are checkpointed, and attention's output and "
        "lse are saved.",
        CHECKPOINT,
        ("megatron", "deepspeed", "huggingface"),
    )
    remat_offload: bool = _option(
        False,
        "Keep what checkpointing saves in pinned host memory until the recompute takes it: each layer's input; with "
        "rematerialization, attention's output and lse too. The copies run beside the computation.",
        scope=("megatron", "deepspeed", "huggingface"),
    )
    loss_tile: int | str = _option(
        "off",
        "Tokens of a rank whose logits exist at a time. Loss, log-probabilities and their gradients are made tile by "
        "tile, and the backward makes the logits again. off: the framework's loss, with the logits of all tokens. 4096 "
        "is enough for speed.",
        ("off",),
        ("megatron", "deepspeed", "huggingface"),
        TOKENS,
    )
    mlp_tile: int | str = _option(
        "off",
        "Tokens of a rank that a dense MLP, and a norm of transformers, computes at a time. The backward computes each "
        "tile once more, so that inner activations exist for one tile only. off: all tokens at once. For the longest "
        "sequences.",
        ("off",),
        ("megatron", "deepspeed", "huggingface"),
        TOKENS,
    )
    transport: str = _option(
        "auto",
        "How messages move between ranks. p2p: sends and receives of NCCL, or of gloo on a CPU. copy_engine: the GPUs' "
        "copy engines write into each other's memory, which takes no multiprocessor from the kernel; all ranks on one "
        "host. auto: copy_engine where every rank can reach every other's memory, CUDA_DEVICE_MAX_CONNECTIONS is not 1 "
        "and an attention's messages need no more than 5 GiB, which it keeps between calls; else p2p.",
        TRANSPORTS,
    )
    cuda_graph: bool = _option(
        False,
        "Capture the forward and the backward of each attention once as a CUDA graph and replay it: for short "
        "sequences, where launches cost more than the kernels. Costs a copy of inputs and results.",
    )
    hardware: str = _option(
        "auto",
        "The machine on which schedule=auto and ulysses_degree=auto compare costs: the name of a shipped profile (as "
        "`dfa-megatron plan --help` lists them), or a .json file that `dfa-megatron doctor --profile` wrote, the same "
        "on every rank. auto: the shipped profile that is nearest to what the ranks see.",
    )
    verify: str = _option(
        "on",
        "Ranks compare what they run. on: everything about every new plan, then the number and a digest of every call, "
        "and a thread watches over the group: ranks that differ, have ended or do not answer are named. off: nothing "
        "is compared, and ranks that differ give wrong numbers or wait without end.",
        VERIFY,
    )

    def __post_init__(self) -> None:
        for name, default, choices, numbers in _RULES:
            _check(f"{name}={getattr(self, name)!r}", getattr(self, name), default, choices, numbers)

    @classmethod
    def options(cls, scope: str | None = None) -> tuple[Field[Any], ...]:
        """Return the fields that can be set in a scope, all for None."""
        return tuple(spec for spec in fields(cls) if scope is None or scope in spec.metadata["scope"])

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], scope: str | None = None) -> DistAttentionConfig:
        """Build from a mapping (JSON, YAML).

        Raises:
            UnsupportedError: a key is unknown (the nearest known one is named), of another scope, or its value wrong.
        """
        known = tuple(spec.name for spec in cls.options(scope))
        for key in values:
            if key not in known:
                elsewhere = cls.belongs(key) if key in cls.__dataclass_fields__ else "no option has that name"
                raise UnsupportedError(f"the key {key!r}", elsewhere, nearest(key, known))
        return cls(**values)

    @classmethod
    def add_arguments(
        cls, parser: argparse.ArgumentParser, scope: str, prefix: str = "--dfa-"
    ) -> argparse.ArgumentParser:
        """Add one argument group with a flag for every field of a scope."""
        name = prefix.lstrip("-").replace("-", "_")
        add_flags(parser.add_argument_group("dfa", "distributed attention (dfa_megatron)"), cls, name, scope)
        parser.set_defaults(**{name + spec.name: spec.default for spec in cls.options(scope)})
        return parser

    @classmethod
    def from_args(cls, args: argparse.Namespace, prefix: str = "dfa_") -> DistAttentionConfig:
        """Read the fields that `add_arguments` put on a namespace; a field whose flag is missing keeps its default."""
        return from_flags(cls, args, prefix)

    @classmethod
    def json_schema(cls, scope: str | None = None) -> dict[str, Any]:
        """Return a JSON schema (draft 2020-12) of the mapping that `from_mapping` takes."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "dfa_megatron distributed attention",
            "type": "object",
            "additionalProperties": False,
            "properties": {spec.name: _property(spec) for spec in cls.options(scope)},
        }

    def replace(self, **changes: Any) -> DistAttentionConfig:
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def within(self, scope: str) -> DistAttentionConfig:
        """Return a copy in which fields outside a scope have their defaults."""
        return self.replace(**{spec.name: spec.default for spec in self._outside(scope)})

    def refuse_outside(self, scope: str, instead: str) -> None:
        """Refuse fields that have no meaning in a scope.

        Raises:
            UnsupportedError: such a field does not have its default value.
        """
        for spec in self._outside(scope):
            if (value := getattr(self, spec.name)) != spec.default:
                raise UnsupportedError(f"{spec.name}={value!r}", self.belongs(spec.name), instead)

    @classmethod
    def belongs(cls, name: str) -> str:
        """Say where an option can be set."""
        return f"it is an option of {' and '.join(cls.__dataclass_fields__[name].metadata['scope'])} alone"

    @property
    def fixed_degree(self) -> int:
        """`ulysses_degree` where it is a number; 1 for "auto"."""
        return 1 if isinstance(self.ulysses_degree, str) else self.ulysses_degree

    @property
    def checkpoints_layers(self) -> bool:
        """Whether this package checkpoints layers, whatever the framework does."""
        return self.checkpoint in ("full", "remat")

    @property
    def saves_attention(self) -> bool:
        """Whether a checkpoint of a layer saves attention's output and lse."""
        return self.checkpoint in ("auto", "remat")

    @property
    def layout_inside(self) -> str:
        """The tokens of a rank inside Megatron's layers, as the functions' `layout` says it."""
        return "contiguous" if self.data_layout == "boundary" else self.data_layout

    def _outside(self, scope: str) -> list[Field[Any]]:
        return [spec for spec in fields(self) if scope not in spec.metadata["scope"]]


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
    if numbers and kind is not str and not numbers.hold(value):
        raise UnsupportedError(what, numbers.why, numbers.instead)


# Dynamo of PyTorch 2.6 traces tuples, no mappings of fields.
_RULES = tuple((s.name, s.default, s.metadata["choices"], s.metadata["numbers"]) for s in fields(DistAttentionConfig))
