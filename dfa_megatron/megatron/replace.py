"""Replace functions of Megatron in this process, and put ours before its classes; nothing on disk changes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_MARK = "_dfa_megatron"
"""The attribute of a function of ours that holds the one in whose place it stands."""


def replace(owner: Any, name: str, replacing: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a function of a class or module, and of every module that has imported it from there.

    Nothing changes at a second call, or where this release has no such name.

    Args:
        owner: the class or the module.
        name: of the function, or of None where a package is missing.
        replacing: makes ours of Megatron's.
    """
    if name not in vars(owner) or hasattr(vars(owner)[name], _MARK):
        return
    megatrons = vars(owner)[name]
    ours = replacing(megatrons) if megatrons is None else functools.wraps(megatrons)(replacing(megatrons))
    setattr(ours, _MARK, megatrons)
    setattr(owner, name, ours)
    if getattr(megatrons, "__module__", None) == getattr(owner, "__name__", ""):
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("megatron.") and vars(module).get(name) is megatrons:
                vars(module)[name] = ours


@functools.cache
def with_ours(ours: type, base: type) -> type:
    """Return the subclass of a class of Megatron's with ours before it, made once; a subclass of ours stays."""
    if issubclass(base, ours):
        return base
    return type(f"{ours.__name__}{base.__name__}", (ours, base), {"__module__": ours.__module__})
