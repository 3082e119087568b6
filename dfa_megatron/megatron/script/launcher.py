"""Prepare this process for a Megatron script: add the `--dfa-*` flags to its parser.

One name is replaced, once: megatron.training.arguments.add_megatron_arguments, which every version of `parse_args`
looks up at call time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.replace import replace
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments

_FLAGS_IN_FILE = "Megatron then takes its settings from the file alone and drops every flag, the --dfa flags as well"
Parser = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def prepare(flags: Sequence[str]) -> MegatronConfig:
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
    options = MegatronConfig.from_args(args)
    if not {"-h", "--help"} & set(flags):
        _check(args, options)
    _add_flags()
    return options


def _check(args: argparse.Namespace, options: MegatronConfig) -> None:
    if not args.spec or args.spec[0] == "local":
        raise UnsupportedError(
            f"dfa_megatron.launch with{f' --spec {args.spec[0]}' if args.spec else 'out --spec'}",
            "Megatron would build its own attention and ignore the --dfa flags",
            "--spec dfa_megatron.megatron get_spec (in Megatron-Core 0.16: SPEC), or a spec of your own made by "
            "distribute_attention; --transformer-impl local for Megatron's own modules",
        )
    if options.data_layout == "contiguous":
        raise UnsupportedError(
            "--dfa-data-layout contiguous in a script",
            "Megatron slices its batches in zigzag order; contiguous is for loops that slice their own by shard_batch",
            "--dfa-data-layout boundary: tokens come in order where they enter the model",
        )
    if args.yaml_cfg is not None:
        raise UnsupportedError("--yaml-cfg with dfa_megatron.launch", _FLAGS_IN_FILE, "the same settings as flags")
    if args.use_legacy_models:
        raise UnsupportedError(
            "--use-legacy-models", "those models have no layer specs", "Megatron-Core models, the default"
        )


def _known(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dfa_megatron.launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", nargs="*")
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--use-legacy-models", action="store_true")
    return add_dfa_arguments(parser).parse_known_args(list(flags))[0]


def _add_flags() -> None:
    import megatron.core

    try:
        from megatron.training import arguments
        from megatron.training.arguments import add_megatron_arguments  # noqa: F401 - must be there
    except ImportError as error:
        raise UnsupportedError(
            f"megatron.training.arguments.add_megatron_arguments of Megatron-Core {megatron.core.__version__}",
            f"it cannot be imported: {error}",
            "a script in a Megatron-LM clone, or a megatron-core wheel from 0.19 on, which have megatron.training; "
            "distribute_attention and shard_batch in a loop of your own need neither",
        ) from error
    replace(arguments, "add_megatron_arguments", _with_ours)


def _with_ours(megatrons: Parser) -> Parser:
    return lambda parser: _with_printable_help(add_dfa_arguments(megatrons(parser)))


def _with_printable_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape a bare % in a help text of Megatron-Core 0.19, which makes --help fail in argparse."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
    return parser
