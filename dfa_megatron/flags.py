"""Command-line flags from the fields of a dataclass: name, type, choices, default and help stand in one place."""

from __future__ import annotations

import argparse
import types
import typing
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def flag(default: Any, help: str, **given: Any) -> Any:
    """Declare a field that is a flag.

    Args:
        default: its value where the flag is left out.
        help: its line in `--help`; the default is added to it.
        given: more for `ArgumentParser.add_argument`, such as choices or metavar.
    """
    return field(default=default, metadata={"flag": given | {"help": help}})


def add_flags(parser: argparse._ActionsContainer, cls: type) -> None:
    """Add `--name` for every field of a dataclass that `flag` declared.

    The type comes from the annotation: int, float, str, Path, bool (`--name` and `--no-name`), `X | None`, or a tuple
    of these (one value or more, or as many as the tuple says).
    """
    hints = typing.get_type_hints(cls)
    for spec in _flags(cls):
        parser.add_argument(
            "--" + spec.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            **_parsed(hints[spec.name]),
            **spec.metadata["flag"] | {"help": _help(spec)},
        )


def from_flags(cls: type[T], args: argparse.Namespace, **more: Any) -> T:
    """Build the dataclass from the flags that were given; the others keep their defaults. `more` sets other fields."""
    names = [spec.name for spec in _flags(cls) if hasattr(args, spec.name)]
    given = {name: getattr(args, name) for name in names}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | more)


def _flags(cls: type) -> list[Field[Any]]:
    return [spec for spec in fields(cls) if "flag" in spec.metadata]


def _parsed(hint: Any) -> dict[str, Any]:
    """How argparse reads values of a type."""
    inner = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (hint,) = (one for one in inner if one is not type(None))
        return _parsed(hint)
    if typing.get_origin(hint) is tuple:
        return _parsed(inner[0]) | {"nargs": "+" if inner[-1] is Ellipsis else len(inner)}
    return {"action": argparse.BooleanOptionalAction} if hint is bool else {"type": hint}


def _help(spec: Field[Any]) -> str:
    text, default = spec.metadata["flag"]["help"], spec.default
    if default in (None, False, "", ()) or default is MISSING or text == argparse.SUPPRESS:
        return str(text)
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})".replace("%", "%%")
