"""Read and write profiles as JSON, as `dfa-megatron doctor --profile` does; refuse malformed files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import PROFILES, Hardware, Host, Link

FORMAT = "dfa_megatron hardware profile 1"

_WRITTEN = "a file that doctor --profile wrote"


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
        values = {"all_to_all": None, "host": asdict(Host()), "multiprocessors": None} | json.loads(text)
        if (found := values.pop("format", None)) != FORMAT:
            raise UnsupportedError(f"{where}, format {found!r}", "another format is known", repr(FORMAT))
        for key in {"forward", "backward"} & values.keys():
            values[key] = tuple((tokens, rate) for tokens, rate in values[key])
        values["links"] = tuple(_link(link, f"{where}, links") for link in values["links"])
        values["network"] = values["network"] and _link(values["network"], f"{where}, network")
        values["host"] = _made(Host, values["host"], f"{where}, host")
        made: Hardware = _made(Hardware, values, where)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(where, f"{type(error).__name__}: {error}", _WRITTEN) from error
    return made


def save(hardware: Hardware, path: Path) -> None:
    """Write a profile to a file.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(to_json(hardware), encoding="utf-8")


def profile_named(name: str) -> Hardware:
    """Return a shipped profile by its name, or one from a file if the name ends in .json.

    Raises:
        UnsupportedError: no such profile, with the known ones; or the file is missing or is no profile.
    """
    if name.endswith(".json"):
        try:
            return from_json(Path(name).read_text(encoding="utf-8"), f"the profile {name}")
        except (OSError, UnicodeDecodeError) as error:
            raise UnsupportedError(f"the profile {name}", str(error), _WRITTEN) from error
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UnsupportedError(f"hardware {name!r}", "there is no such profile", f"one of {known}, or a .json file")
    return PROFILES[name]


def _link(values: Any, where: str) -> Link:
    rate = values.get("bytes_per_second", 0) if isinstance(values, dict) else 0
    made: Link = _made(Link, values | {"bytes_per_second": math.inf} if rate is None else values, where)
    return made


def _made(cls: Any, values: Any, where: str) -> Any:
    """Make a record of an object that has exactly its fields."""
    names = [field.name for field in fields(cls)]
    if not isinstance(values, dict) or values.keys() != set(names):
        odd = ", ".join(sorted(values.keys() ^ set(names))) if isinstance(values, dict) else repr(values)
        raise UnsupportedError(where, f"it lacks or does not know {odd}", "exactly " + ", ".join(names))
    try:
        return cls(**values)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}, {error.what}", error.why, error.instead) from error
