"""Replace names of other packages in this process, and put all of them back: docs/hooks.md lists them."""

from __future__ import annotations

from typing import Any

_REPLACED: list[tuple[Any, str, Any]] = []
"""The owner (a module, or a class), the name, and what stood there before, in the order of replacement."""


def replace(owner: Any, name: str, ours: Any) -> None:
    """Put ours where a module or a class has a name of its own."""
    _REPLACED.append((owner, name, vars(owner)[name]))
    setattr(owner, name, ours)


def put_back(owner: Any, name: str) -> None:
    """Put back one name, if it is replaced."""
    for at, (other, alias, own) in enumerate(_REPLACED):
        if other is owner and alias == name:
            setattr(owner, name, own)
            del _REPLACED[at]
            return


def restore() -> None:
    """Put back every name that was replaced; a model that is distributed then raises, until it is distributed again."""
    while _REPLACED:
        owner, name, own = _REPLACED.pop()
        setattr(owner, name, own)


def replaced() -> list[str]:
    """Return the names that are replaced now, such as "deepspeed.initialize"."""
    return sorted({f"{owner.__name__}.{name}" for owner, name, _ in _REPLACED})
