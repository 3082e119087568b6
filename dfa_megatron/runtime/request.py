"""What one call asks for, as a value that prints to a line of JSON: the operator takes it as a string constant."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache

from dfa_megatron.plan.mask import Mask, of_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything about a distributed attention that is not a tensor or a group."""

    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    schedule: str = "auto"
    layout: str = "contiguous"
    ulysses_degree: int = 1
    kernel: str = "auto"
    deterministic: bool = False
    wire_dtype: str = "input"
    transport: str = "auto"
    cuda_graph: bool = False
    verify: str = "once"
    agreement_timeout: float = 120.0

    def mask(self, length: int) -> Mask:
        """The mask over a whole sequence of that many tokens."""
        return of_window(length, self.causal, self.window_size)

    def to_text(self) -> str:
        """One line of JSON; equal requests give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@lru_cache(maxsize=256)
def from_text(text: str) -> Request:
    """The request that `to_text` wrote."""
    values = json.loads(text)
    values["window_size"] = tuple(values["window_size"])
    return Request(**values)
