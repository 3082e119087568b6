"""What the self-check needs of transformers: reads a config, makes the model small, trains it and records tensors.

`case_of(words)` is the entry. command.py reads words, shrink.py reduces, model.py builds, watch.py records attention,
train.py runs in the rank processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfa_megatron.huggingface.selfcheck.command import case_of

__all__ = ["case_of"]


def __getattr__(name: str) -> Any:
    if name == "case_of":
        from dfa_megatron.huggingface.selfcheck.command import case_of

        return case_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
