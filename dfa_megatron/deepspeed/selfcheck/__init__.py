"""What the self-check needs of DeepSpeed: reads its JSON, makes engine and model small, trains and records tensors.

`case_of(words)` is the entry. command.py reads words and makes the case, shrink.py reduces the JSON, train.py runs in
the rank processes, at_start.py is the block's key `selfcheck`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfa_megatron.deepspeed.selfcheck.command import case_of

__all__ = ["case_of"]


def __getattr__(name: str) -> Any:
    if name == "case_of":
        from dfa_megatron.deepspeed.selfcheck.command import case_of

        return case_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
