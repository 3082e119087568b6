"""Refuse values of a hardware profile that make no sense."""

from __future__ import annotations

import sys

from dfa_megatron.errors import UnsupportedError


def refuse_name(name: str, value: object) -> None:
    """Refuse what is no text, or empty."""
    if not isinstance(value, str) or not value:
        raise UnsupportedError(f"{name}={value!r}", f"{value!r} is no name", "some text")


def refuse_number(name: str, value: object, most: float = sys.float_info.max) -> None:
    """Refuse what is no number, or beyond `most`."""
    if type(value) not in (int, float) or not abs(value) <= most:  # type: ignore[arg-type]
        raise UnsupportedError(f"{name}={value}", f"{value!r} is no finite number", "a number")


def refuse_rate(name: str, value: float, most: float = sys.float_info.max) -> None:
    """Refuse what is no positive number."""
    refuse_number(name, value, most)
    if value <= 0:
        raise UnsupportedError(f"{name}={value}", "it must be positive", "a rate above 0")


def refuse_time(name: str, value: float) -> None:
    """Refuse what is no number of seconds."""
    refuse_number(name, value)
    if value < 0:
        raise UnsupportedError(f"{name}={value}", "it must not be negative", "seconds, 0 or more")
