"""Read and write profiles as JSON, as `dfa-megatron doctor --profile` does; refuse malformed files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import PROFILES, Curve, Hardware, Host, Link

T = TypeVar("T")

FORMAT = "dfa_megatron hardware profile 1"

_SINCE = {"all_to_all": None, "host": asdict(Host()), "multiprocessors": None}
"""Values of keys that older files lack."""


def to_json(hardware: Hardware) -> str:
    """Return a profile as JSON; an unbounded rate is null."""
    values = {"format": FORMAT, **asdict(hardware)}
    for link in (*values["links"], values["network"]):
        if link is not None and math.isinf(link["bytes_per_second"]):
            link["bytes_per_second"] = None
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def from_json(text: str, where: str = "the profile") -> Hardware:
    """Return the profile that this or an earlier version of `to_json` wrote; refuse other keys.

    Args:
        where: the name of the file in messages.

    Raises:
        UnsupportedError: the JSON is malformed or a value makes no sense; the message names the key.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnsupportedError(where, f"it is no JSON: {error}", "a file that doctor --profile wrote") from error
    if isinstance(values, dict):
        values = _SINCE | values
    _refuse_keys(values, ("format", *_names(Hardware)), where)
    if (found := values.pop("format")) != FORMAT:
        raise UnsupportedError(f"{where}, format {found!r}", "another format is known", repr(FORMAT))
    if not isinstance(values["links"], list):
        raise UnsupportedError(f"{where}, links", "it is no list", "a list of links")
    values["links"] = tuple(_link(link, f"{where}, links") for link in values["links"])
    if values["network"] is not None:
        values["network"] = _link(values["network"], f"{where}, network")
    _refuse_keys(values["host"], _names(Host), f"{where}, host")
    values["host"] = _made(Host, values["host"], f"{where}, host")
    for phase in ("forward", "backward"):
        values[phase] = _curve(values[phase], f"{where}, {phase}")
    return _made(Hardware, values, where)


def save(hardware: Hardware, path: Path) -> None:
    """Write a profile to a file.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(to_json(hardware), encoding="utf-8")


def load(path: Path) -> Hardware:
    """Read a profile from a file.

    Raises:
        UnsupportedError: the file is missing or is no profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"the profile {path}", str(error), "a file that doctor --profile wrote") from error
    return from_json(text, f"the profile {path}")


def profile_named(name: str) -> Hardware:
    """Return a shipped profile by its name, or one from a file if the name ends in .json.

    Raises:
        UnsupportedError: no such profile; the message names the known ones.
    """
    if name.endswith(".json"):
        return load(Path(name))
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UnsupportedError(f"hardware {name!r}", "there is no such profile", f"one of {known}, or a .json file")
    return PROFILES[name]


def _link(values: Any, where: str) -> Link:
    _refuse_keys(values, _names(Link), where)
    rate = values["bytes_per_second"]
    return _made(Link, values | {"bytes_per_second": math.inf if rate is None else rate}, where)


def _curve(values: Any, where: str) -> Curve:
    if not isinstance(values, list) or not all(isinstance(point, list) and len(point) == 2 for point in values):
        raise UnsupportedError(where, "it is no list of [tokens, operations per second]", "for example [[4096, 4e14]]")
    return tuple((tokens, rate) for tokens, rate in values)


def _made(cls: Callable[..., T], values: dict[str, Any], where: str) -> T:
    try:
        return cls(**values)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}, {error.what}", error.why, error.instead) from error


def _names(cls: type[Hardware | Link | Host]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def _refuse_keys(values: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(values, dict):
        raise UnsupportedError(where, "it is no JSON object", "an object with " + ", ".join(keys))
    missing, unknown = [key for key in keys if key not in values], [key for key in values if key not in keys]
    if missing or unknown:
        found = [f"{name} {', '.join(some)}" for name, some in (("lacks", missing), ("has unknown", unknown)) if some]
        raise UnsupportedError(where, "it " + " and ".join(found), "exactly " + ", ".join(keys))
