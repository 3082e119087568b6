"""Classes of modules that compute by tiles: a module of a model gets one in place of its own class."""

from __future__ import annotations

import copyreg
import functools
from typing import Any


@functools.cache
def tiled_class(first: type, base: type) -> type:
    """Return the class of both, made once.

    Its instances pickle by the two classes, which are found by their names; it has no name of its own.
    """
    made = type(f"Tiled{base.__name__}", (first, base), {"__module__": __name__})
    copyreg.pickle(made, _reduced)
    return made


def _reduced(module: Any) -> tuple[Any, ...]:
    return (_empty, type(module).__bases__, *module.__reduce_ex__(2)[2:])


def _empty(first: type, base: type) -> Any:
    made: Any = tiled_class(first, base)
    return made.__new__(made)
