"""Read and write profiles as JSON, as `dfa-megatron doctor --profile` does; refuse malformed files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import PROFILES, Curve, Hardware, Link

FORMAT = "dfa_megatron hardware profile 1"

_KEYS = ("format", "name", "forward", "backward", "links", "launch_overhead", "ranks_per_node", "network", "all_to_all")
_SINCE = ("all_to_all",)
"""Keys that older files lack; a missing one is read as null."""
_LINK_KEYS = ("transport", "bytes_per_second", "latency")


def to_json(hardware: Hardware) -> str:
    """Return a profile as JSON; an unbounded rate is null."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": hardware.name,
        "forward": [list(point) for point in hardware.forward],
        "backward": [list(point) for point in hardware.backward],
        "links": [_from_link(link) for link in hardware.links],
        "launch_overhead": hardware.launch_overhead,
        "ranks_per_node": hardware.ranks_per_node,
        "network": None if hardware.network is None else _from_link(hardware.network),
        "all_to_all": hardware.all_to_all,
    }
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
        values = {**dict.fromkeys(_SINCE), **values}
    _refuse_keys(values, _KEYS, where)
    if values["format"] != FORMAT:
        raise UnsupportedError(f"{where}, format {values['format']!r}", "another format is known", repr(FORMAT))
    name, nodes, network, several = (values[key] for key in ("name", "ranks_per_node", "network", "all_to_all"))
    if not isinstance(name, str) or not name:
        raise UnsupportedError(f"{where}, name", f"{name!r} is no name", "some text")
    if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool)):
        raise UnsupportedError(f"{where}, ranks_per_node", f"{nodes!r} is no whole number", "a number, or null")
    if not isinstance(values["links"], list):
        raise UnsupportedError(f"{where}, links", "it is no list", "a list of links")
    try:
        return Hardware(
            name,
            _curve(values["forward"], f"{where}, forward"),
            _curve(values["backward"], f"{where}, backward"),
            tuple(_link(link, f"{where}, links") for link in values["links"]),
            _number(values["launch_overhead"], f"{where}, launch_overhead"),
            nodes,
            None if network is None else _link(network, f"{where}, network"),
            None if several is None else _number(several, f"{where}, all_to_all"),
        )
    except UnsupportedError as error:
        if error.what.startswith(where):
            raise
        raise UnsupportedError(f"{where}, {error.what}", error.why, error.instead) from error


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


def _from_link(link: Link) -> dict[str, Any]:
    rate = None if math.isinf(link.bytes_per_second) else link.bytes_per_second
    return {"transport": link.transport, "bytes_per_second": rate, "latency": link.latency}


def _link(values: Any, where: str) -> Link:
    _refuse_keys(values, _LINK_KEYS, where)
    rate = values["bytes_per_second"]
    if not isinstance(values["transport"], str):
        raise UnsupportedError(f"{where}, transport", f"{values['transport']!r} is no name", "for example p2p")
    return Link(
        values["transport"],
        math.inf if rate is None else _number(rate, f"{where}, bytes_per_second"),
        _number(values["latency"], f"{where}, latency"),
    )


def _curve(values: Any, where: str) -> Curve:
    if not isinstance(values, list) or not all(isinstance(point, list) and len(point) == 2 for point in values):
        raise UnsupportedError(where, "it is no list of [tokens, operations per second]", "for example [[4096, 4e14]]")
    return tuple((_number(tokens, where), _number(rate, where)) for tokens, rate in values)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedError(where, f"{value!r} is no finite number", "a number")
    return value


def _refuse_keys(values: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(values, dict):
        raise UnsupportedError(where, "it is no JSON object", "an object with " + ", ".join(keys))
    missing, unknown = [key for key in keys if key not in values], [key for key in values if key not in keys]
    if missing or unknown:
        found = [f"{name} {', '.join(some)}" for name, some in (("lacks", missing), ("has unknown", unknown)) if some]
        raise UnsupportedError(where, "it " + " and ".join(found), "exactly " + ", ".join(keys))
