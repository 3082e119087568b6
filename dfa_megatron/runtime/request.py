"""What one call asks for, as a value that prints to a line of JSON: the operator takes it as a string constant."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.mask import Mask, of_window
from dfa_megatron.runtime.agreement.guard import Guard
from dfa_megatron.runtime.cu_seqlens import Offsets, balancing_mask, mask_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything about a distributed attention that is not a tensor or a group.

    sinks: the call brings a sink for each head; a tensor, but ranks must agree on whether there is one.
    alibi: the call brings a slope for each head, the same.
    cu_seqlens: global token offsets of packed documents; empty for sequences that are one document each.
    """

    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    schedule: str = "auto"
    layout: str = "contiguous"
    ulysses_degree: int | str = "auto"
    kernel: str = "auto"
    deterministic: bool = False
    wire_dtype: str = "input"
    transport: str = "auto"
    cuda_graph: bool = False
    hardware: str = "auto"
    verify: str = "on"
    agreement_timeout: float = 120.0
    stall_timeout: float = 1800.0
    cu_seqlens: Offsets = ()

    def __post_init__(self) -> None:
        for name in ("softmax_scale", "softcap", "agreement_timeout", "stall_timeout"):
            if type(value := getattr(self, name)) is int:
                object.__setattr__(self, name, float(value))

    def check(self) -> None:
        """Refuse values that no attention can have; what a plan or a kernel decides is refused there.

        Raises:
            UnsupportedError: names the option, and values that it can have.
        """
        names = {spec.name for spec in DistAttentionConfig.options("function")} - {"schedule", "kernel"}
        DistAttentionConfig(**{name: getattr(self, name) for name in names})
        if type(self.causal) is not bool:
            raise UnsupportedError(f"causal={self.causal!r}", "it must be of type bool", "True or False")
        window = self.window_size
        if type(window) is not tuple or len(window) != 2 or any(type(side) is not int or side < -1 for side in window):
            why, instead = (
                "it is two integers, the tokens to each side",
                "(left, right), each -1 for no bound or at least 0",
            )
            raise UnsupportedError(f"window_size={window!r}", why, instead)
        if type(self.softcap) is not float:
            raise UnsupportedError(f"softcap={self.softcap!r}", "it must be of type float", "0.0 for none")
        if type(self.softmax_scale) is not float or not 0 < self.softmax_scale < math.inf:
            what, instead = f"softmax_scale={self.softmax_scale!r}", "None, which is head_dim ** -0.5"
            raise UnsupportedError(what, "it is positive and finite", instead)

    def mask(self, length: int) -> Mask:
        """The mask over a whole sequence of that many tokens.

        Raises:
            UnsupportedError: the documents are not those of so many tokens, or the layout needs some.
        """
        if not self.cu_seqlens:
            if self.layout == "load_balanced":
                why, instead = "its tokens are load_balanced by documents", "dist_flash_attn_varlen_func"
                raise UnsupportedError("layout 'load_balanced' without cu_seqlens", why, instead)
            return of_window(length, self.causal, self.window_size)
        mask = mask_of(self.cu_seqlens, length, causal=self.causal, window_size=self.window_size)
        return (
            replace(mask, balanced_by=balancing_mask(self.cu_seqlens, length))
            if self.layout == "load_balanced"
            else mask
        )

    @property
    def guard(self) -> Guard:
        """How the group's calls are looked after."""
        return Guard.of(self.verify, self.agreement_timeout, self.stall_timeout)

    def for_plan(self) -> Request:
        """The request with defaults for what its plan does not depend on: layers that differ in that share plans."""
        kept = {name: getattr(self, name) for name in _PLANNED}
        return Request(softmax_scale=1.0, **kept)

    def to_text(self) -> str:
        """One line of JSON; equal requests give equal text. A value of no JSON type is written as Python shows it."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=repr)


_PLANNED = ("causal", "window_size", "schedule", "layout", "cu_seqlens")


@lru_cache(maxsize=256)
def from_text(text: str) -> Request:
    """The request that `to_text` wrote."""
    values: dict[str, Any] = json.loads(text)
    for name in ("window_size", "cu_seqlens"):
        values[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return Request(**values)
