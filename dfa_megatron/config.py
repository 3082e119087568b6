"""Every option of the project, once: flags, JSON schema and the documentation's tables are generated from here."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dfa_megatron.errors import UnsupportedError

SCHEDULES = ("auto", "ring", "balanced", "balanced_shared", "zigzag", "greedy")
LAYOUTS = ("contiguous", "boundary", "zigzag")
KERNELS = ("auto", "reference", "cpu", "triton", "aten", "flash2", "cudnn", "flash3", "flash4")
REMAT = ("auto", "on", "off")
WIRE_DTYPES = ("input", "float32")
VERIFY = ("on", "off")
TRANSPORTS = ("auto", "p2p", "copy_engine")


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class DistAttentionConfig:
    """The options of one distributed attention; a field means what the user wrote.

    Raises:
        UnsupportedError: a value is of the wrong type or not among its choices; the nearest known one is named.
    """

    schedule: str = _option(
        "auto",
        "Who computes which block at which step. ring: every rank computes its own rows. balanced: DISTFLASHATTN as "
        "published. balanced_shared: the same with the idle slot of an even number of ranks filled. zigzag: needs the "
        "zigzag layout. greedy: helpers take work by area, for packed documents. auto: the cheapest of those that the "
        "mask and the layout allow.",
        SCHEDULES,
    )
    layout: str = _option(
        "contiguous",
        "Which tokens a rank holds. contiguous: one slice, in order (this package slices the data). boundary: the "
        "framework's data stay zigzag, hidden states are exchanged before the first layer and after the last. zigzag: "
        "the framework's data stay zigzag and attention works on them as they are.",
        LAYOUTS,
    )
    ulysses_degree: int = _option(
        1,
        "Ranks that exchange heads for tokens with their neighbours, all-to-all, around the schedule, which then runs "
        "over the ranks of the group divided by it, with the heads divided by it. It must divide both; kv heads that "
        "several ranks need are copied. Meant for the ranks of one node. 0: what the planner finds cheapest.",
    )
    kernel: str = _option(
        "auto", "Which kernel computes a block. auto: the fastest that can do the request on this device.", KERNELS
    )
    remat: str = _option(
        "auto",
        "Rematerialization-aware checkpointing: keep attention's output and lse, recompute the rest of the layer. "
        "auto: on where full recomputation was asked for.",
        REMAT,
    )
    remat_offload: bool = _option(
        False,
        "Keep them in pinned host memory until the recompute takes them; they travel beside the computation. Needs "
        "rematerialization.",
    )
    deterministic: bool = _option(False, "The same gradients to the bit from run to run; may be slower.")
    wire_dtype: str = _option(
        "input",
        "The dtype of partial outputs and gradients on the wire. input: that of q. float32: larger messages, no "
        "rounding between ranks.",
        WIRE_DTYPES,
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
        "The machine on which schedule=auto and ulysses_degree=0 compare costs: the name of a shipped profile (as "
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
    agreement_timeout: float = _option(
        120.0,
        "Seconds that a rank waits for the others to prepare the same plan before it says who is missing. Every new "
        "pack is such a plan: allow for a rank that is held up alone, by writing a checkpoint for example.",
    )
    stall_timeout: float = _option(
        1800.0,
        "Seconds that a running attention waits for a rank that gives no sign of life, before the run is ended with "
        "its name. A rank that lives but is elsewhere (compiles, writes a checkpoint) is waited for as long as the "
        "process group's own timeout says. 0: no limit.",
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            if type(spec.default) is float and type(value := getattr(self, spec.name)) is int:
                object.__setattr__(self, spec.name, float(value))
        check_options({spec.name: getattr(self, spec.name) for spec in fields(self)})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DistAttentionConfig:
        """Build from a mapping (JSON, YAML); an unknown key is an error that names the nearest known one."""
        known = tuple(spec.name for spec in fields(cls))
        for key in values:
            if key not in known:
                raise UnsupportedError(f"the key {key!r}", "no option has that name", _nearest(str(key), known))
        return cls(**values)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, prefix: str = "--dfa-") -> argparse.ArgumentParser:
        """Add one argument group with a flag for every field."""
        group = parser.add_argument_group("dfa", "distributed attention (dfa_megatron)")
        for spec in fields(cls):
            flag = prefix + spec.name.replace("_", "-")
            # Of the parser, which may have set another default than ours.
            help_text = f"{spec.metadata['help']} Default: %(default)s."
            if isinstance(spec.default, bool):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=spec.default, help=help_text)
            else:
                group.add_argument(
                    flag,
                    type=type(spec.default),
                    choices=spec.metadata["choices"],
                    default=spec.default,
                    help=help_text,
                )
        return parser

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> DistAttentionConfig:
        """Read the fields that `add_arguments` put on a namespace; a field whose flag is missing keeps its default."""
        return cls(**{s.name: getattr(args, f"dfa_{s.name}") for s in fields(cls) if hasattr(args, f"dfa_{s.name}")})

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """A JSON schema (draft 2020-12) of the mapping that `from_mapping` takes."""
        names = {str: "string", bool: "boolean", int: "integer", float: "number"}
        properties: dict[str, Any] = {}
        for spec in fields(cls):
            entry: dict[str, Any] = {
                "type": names[type(spec.default)],
                "default": spec.default,
                "description": spec.metadata["help"],
            }
            if spec.metadata["choices"]:
                entry["enum"] = list(spec.metadata["choices"])
            properties[spec.name] = entry
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "dfa_megatron distributed attention",
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
        }

    @classmethod
    def markdown_table(cls) -> str:
        """The options as the table that the documentation prints."""
        rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
        for spec in fields(cls):
            choices = ", ".join(spec.metadata["choices"]) if spec.metadata["choices"] else type(spec.default).__name__
            rows.append(f"| `{spec.name}` | `{spec.default}` | {choices} | {spec.metadata['help']} |")
        return "\n".join(rows)

    def keywords(self) -> dict[str, Any]:
        """These options as keywords of `dist_flash_attn_func`, for layers whose tokens lie as the layout says inside.

        `boundary` is contiguous there; rematerialization is no matter of the function's.
        """
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if not spec.name.startswith("remat")}
        return values | {"layout": "contiguous" if self.layout == "boundary" else self.layout}

    def replace(self, **changes: Any) -> DistAttentionConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def check_options(values: Mapping[str, Any], open_ended: Collection[str] = ()) -> None:
    """Refuse values that some of the options cannot have.

    Args:
        values: by the option's name; names that are no option are passed over.
        open_ended: options with more values than their choices here, which are compared elsewhere.

    Raises:
        UnsupportedError: a value is of the wrong type, out of range or not among its choices.
    """
    for spec in fields(DistAttentionConfig):
        if spec.name not in values:
            continue
        value: Any = values[spec.name]
        choices: tuple[str, ...] | None = spec.metadata["choices"]
        kind: Any = type(spec.default)
        what = f"{spec.name}={value!r}"
        if type(value) is not kind:
            raise UnsupportedError(what, f"it must be of type {kind.__name__}", f"for example {spec.default!r}")
        if choices and value not in choices and spec.name not in open_ended:
            raise UnsupportedError(what, "there is no such value", _nearest(str(value), choices))
        if spec.name == "ulysses_degree" and value < 0:
            works = "1, which exchanges nothing, more, or 0 for the cheapest"
            raise UnsupportedError(what, "it is a number of ranks", works)
        if spec.name == "agreement_timeout" and not 0 < value < math.inf:
            raise UnsupportedError(what, "it must be positive and finite", "seconds above 0")
        if spec.name == "stall_timeout" and not 0 <= value < math.inf:
            raise UnsupportedError(what, "it is a time", "seconds, or 0 for no limit")


def _nearest(value: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    return (f"perhaps {close[0]!r}; " if close else "") + "one of " + ", ".join(known)
