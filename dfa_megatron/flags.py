"""Command-line flags from the fields of a dataclass: name, type, choices, default and help stand in one place."""

from __future__ import annotations

import argparse
import contextlib
import functools
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def flag(default: Any, help: str = "", *, group: str = "options", **given: Any) -> Any:
    """Declare a field that is a flag.

    Args:
        default: its value where the flag is left out.
        help: its line in `--help`; the default is added to it, unless it says `%(default)s` itself.
        group: the heading above it in `--help`.
        given: more for `ArgumentParser.add_argument`, such as choices or metavar.
    """
    return field(default=default, metadata={"flag": given | {"help": help}, "group": group})


def add_flags(parser: argparse._ActionsContainer, cls: type, prefix: str = "") -> None:
    """Add `--name` for every field of a dataclass that `flag` declared.

    The type comes from the annotation: int, float, str, Path, bool (`--name` and `--no-name`), a union of these (the
    first that fits, None aside), or a tuple (one value or more, or as many as the tuple says).

    Args:
        parser: a parser or a group of one.
        cls: the dataclass. A flag that is left out leaves no trace, unless the parser sets a default.
        prefix: goes before every name.
    """
    hints, groups = typing.get_type_hints(cls), {"options": parser}
    for spec in _flags(cls):
        title = spec.metadata.get("group", "options")
        groups.setdefault(title, groups.get(title) or parser.add_argument_group(title)).add_argument(
            "--" + (prefix + spec.name).replace("_", "-"),
            default=argparse.SUPPRESS,
            **_parsed(hints[spec.name]),
            **spec.metadata["flag"] | {"help": _help(spec)},
        )


def from_flags(cls: type[T], args: argparse.Namespace, prefix: str = "", **more: Any) -> T:
    """Build the dataclass from the flags that were given; the others keep their defaults. `more` sets other fields."""
    given = {s.name: getattr(args, prefix + s.name) for s in _flags(cls) if hasattr(args, prefix + s.name)}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | more)


def _flags(cls: type) -> list[Field[Any]]:
    return [spec for spec in fields(cls) if "flag" in spec.metadata]


def _parsed(hint: Any) -> dict[str, Any]:
    """How argparse reads values of a type."""
    inner = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        return _parsed(kinds[0]) if len(kinds) == 1 else {"type": functools.partial(_first_that_fits, kinds)}
    if typing.get_origin(hint) is tuple:
        return _parsed(inner[0]) | {"nargs": "+" if inner[-1] is Ellipsis else len(inner)}
    return {"action": argparse.BooleanOptionalAction} if hint is bool else {"type": hint}


def _first_that_fits(kinds: Sequence[Callable[[str], Any]], text: str) -> Any:
    for kind in kinds[:-1]:
        with contextlib.suppress(ValueError):
            return kind(text)
    return kinds[-1](text)


def _help(spec: Field[Any]) -> str:
    text, default = spec.metadata["flag"]["help"], spec.default
    if default in (None, False, "", ()) or default is MISSING or text == argparse.SUPPRESS or "%(default)s" in text:
        return str(text)
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})".replace("%", "%%")
