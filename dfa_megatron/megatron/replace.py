"""Replace functions of Megatron in this process, and put ours before its classes; nothing on disk changes.

A name that is not there raises. So does a mixer (attention, a layer with states) whose forward ran without reaching
every function of ours that it and its children list as `dfa_reaches`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron import hooks

_BELOW = {*sys.stdlib_module_names, "numpy", "sympy", "torch", "triton"}  # they import nothing of Megatron


class _Reached(threading.local):
    functions: frozenset[str] = frozenset()


_REACHED = _Reached()
"""The functions of ours that the mixer has reached whose forward this thread runs."""


def replace(owner: Any, name: str, replacing: Callable[[Any], Callable[..., Any]], *, optional: bool = False) -> None:
    """Replace a function as `hooks.replace` does, and in every module that has imported it from its own."""
    megatrons = vars(owner).get(name)
    hooks.replace(owner, name, replacing, optional=optional)
    if getattr(megatrons, "__module__", None) == owner.__name__ and not hasattr(megatrons, hooks.OWN):
        ours = vars(owner)[name]
        for module in [one for name, one in sys.modules.items() if name.partition(".")[0] not in _BELOW]:
            for alias in [alias for alias, value in [*getattr(module, "__dict__", {}).items()] if value is megatrons]:
                hooks.replace(module, alias, lambda _: ours)


@functools.cache
def with_ours(ours: type, base: type) -> type:
    """Return the subclass of a class of Megatron's with ours before it, made once; a subclass of ours stays."""
    if issubclass(base, ours):
        return base
    return type(f"{ours.__name__}{base.__name__}", (ours, base), {"__module__": ours.__module__})


def watch(mixer: torch.nn.Module) -> None:
    """Have the forward of a mixer raise where it has not reached what it and its children list."""
    mixer.register_forward_pre_hook(_forget)
    mixer.register_forward_hook(_check_reached)


def reach(function: str) -> None:
    """Note that a function of ours runs, in the forward of a mixer."""
    _REACHED.functions |= {function}


def _forget(mixer: torch.nn.Module, args: tuple[Any, ...]) -> None:
    _REACHED.functions = frozenset()


def _check_reached(mixer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise where a mixer has run without reaching each of the listed functions."""
    listed = {name for part in (mixer, *mixer.children()) for name in getattr(part, "dfa_reaches", ())}
    if missed := listed - _REACHED.functions:
        hooks.refuse_unreached(mixer, missed)
