"""Prepare this process for a Megatron script: add the `--dfa-*` flags to its parser.

One name is replaced, once: megatron.training.arguments.add_megatron_arguments, which every version of `parse_args`
looks up at call time.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.refusals import LAUNCH
from dfa_megatron.megatron.start.dfa_flags import add_dfa_arguments
from dfa_megatron.megatron.versions import say_if_not_tried, version

_MARK = "_dfa_megatron"
"""Set on a function that stands in for one of Megatron's, so that a second call replaces nothing."""


def prepare(flags: Sequence[str]) -> DistAttentionConfig:
    """Put our flags into Megatron's parser.

    Args:
        flags: the script's arguments. With -h or --help nothing is refused: the script prints its help.

    Returns:
        The options in the flags.

    Raises:
        UnsupportedError: flags that would be silently wrong, or a Megatron without the replaced names.
        SystemExit: a --dfa flag with an invalid value, as in argparse.
    """
    args = _known(flags)
    options = DistAttentionConfig.from_args(args)
    if not {"-h", "--help"} & set(flags):
        LAUNCH.check(args, launched=True)
    _add_flags()
    say_if_not_tried()
    return options


def _known(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dfa_megatron.launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", nargs="*")
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--use-legacy-models", action="store_true")
    return add_dfa_arguments(parser).parse_known_args(list(flags))[0]


def _named(module_name: str, name: str) -> tuple[Any, Callable[..., Any]]:
    """Return a Megatron module and its function of that name."""
    where = f"{module_name}.{name} of Megatron-Core {version()}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise ImportError(f"{module_name} of Megatron-Core {version()} cannot be imported: {error}") from error
        LAUNCH.check(missing_module=(where, error.name))
    function: Any = getattr(module, name, None)
    LAUNCH.check(missing_function=None if callable(function) else where)
    return module, function


def _add_flags() -> None:
    module, add_megatron_arguments = _named("megatron.training.arguments", "add_megatron_arguments")
    if hasattr(add_megatron_arguments, _MARK):
        return

    @functools.wraps(add_megatron_arguments)
    def with_dfa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return _with_printable_help(add_dfa_arguments(add_megatron_arguments(parser)))

    setattr(with_dfa_arguments, _MARK, add_megatron_arguments)
    module.add_megatron_arguments = with_dfa_arguments


def _with_printable_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape a bare % in a help text of Megatron-Core 0.18 and 0.19, which makes --help fail in argparse."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
    return parser
