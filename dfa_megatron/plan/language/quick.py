"""Make frozen records in two thirds of the time that a frozen dataclass takes: a plan has thousands of them."""

from __future__ import annotations

from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

Record = TypeVar("Record")


def quick(cls: type[Record]) -> type[Record]:
    """Let a frozen dataclass with slots store its fields through the slots; its own `__init__` looks each up by name.

    Args:
        cls: every field is a parameter, and there is no `__post_init__`.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    scope: dict[str, Any] = {f"set_{name}": vars(cls)[name].__set__ for name in names}
    lines = [f"def __init__(self, {', '.join(names)}):", *(f"    set_{name}(self, {name})" for name in names)]
    exec("\n".join(lines), scope)  # noqa: S102 -- as dataclasses makes its own
    made, old = scope["__init__"], cls.__init__
    made.__defaults__ = old.__defaults__
    cls.__init__ = wraps(old)(made)  # type: ignore[method-assign]
    return cls
