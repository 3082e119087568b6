"""Replace names of other packages in this process, and put all of them back: docs/hooks.md lists them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from dfa_megatron.errors import UnsupportedError

OWN = "_dfa_own"
"""The attribute of a function of ours that holds the one in whose place it stands."""

TESTED = "versions that `dfa-megatron doctor` names"

_REPLACED: list[tuple[Any, str, Any]] = []
"""The owner (a module, or a class), the name, and what stood there before, in the order of replacement."""


def replace(owner: Any, name: str, replacing: Callable[[Any], Callable[..., Any]], *, optional: bool = False) -> None:
    """Put ours where a module or a class has a function of its own, once: ours stays.

    name: of the function, or of None where a package is missing. replacing: makes ours of theirs.
    optional: this release need not have the name.
    """
    if name not in vars(owner) and not optional:
        raise UnsupportedError(f"a version without {owner.__name__}.{name}", "ours takes its place", TESTED)
    if name not in vars(owner) or hasattr(theirs := vars(owner)[name], OWN):
        return
    ours = replacing(theirs) if theirs is None else functools.wraps(theirs)(replacing(theirs))
    setattr(ours, OWN, theirs)
    _REPLACED.append((owner, name, theirs))
    setattr(owner, name, ours)


def surround(owner: Any, name: str, ours: Callable[..., Any], *, optional: bool = False) -> None:
    """Put ours there as `replace` does; it is called with theirs before the arguments."""
    replace(owner, name, lambda theirs: lambda *args, **kwargs: ours(theirs, *args, **kwargs), optional=optional)


@contextmanager
def for_a_while(owner: Any, /, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while; one that it did not have by itself is deleted after it."""
    own = owner.__dict__ if hasattr(owner, "__dict__") else {name: getattr(owner, name) for name in values}  # slots
    before = {name: own[name] for name in values if name in own}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def put_back(owner: Any, name: str) -> None:
    """Put back one name, if it is replaced."""
    for each in [each for each in _REPLACED if each[:2] == (owner, name)]:
        _REPLACED.remove(each)
        setattr(*each)


def restore() -> None:
    """Put back every name that was replaced; a model that is distributed then raises, until it is distributed again."""
    while _REPLACED:
        setattr(*_REPLACED.pop())


def replaced() -> list[str]:
    """Return the names that are replaced now, such as "deepspeed.initialize"."""
    return sorted({f"{owner.__name__}.{name}" for owner, name, _ in _REPLACED})


def refuse_unreached(layer: object, missed: Iterable[str]) -> NoReturn:
    """Refuse a layer that computes from several tokens by itself."""
    raise UnsupportedError(
        f"a layer of type {type(layer).__name__} that did not reach {', '.join(sorted(missed))}",
        "it has computed from the tokens of this rank alone",
        f"distribute_attention after changes of layers or of their implementation, and {TESTED}",
    )
