"""What the self-check needs of Megatron-Core: reads its flags, makes the model small, trains it and records tensors.

`case_of(flags)` is the entry. flags.py reads, shrink.py reduces, model.py builds, train.py runs in the rank processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfa_megatron.megatron.selfcheck.shrink import case_of

__all__ = ["case_of"]


def __getattr__(name: str) -> Any:
    if name == "case_of":
        from dfa_megatron.megatron.selfcheck.shrink import case_of

        return case_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
