"""torchrun takes none of our flags for an abbreviation of its own, for which it looks behind a script's name too."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.run import get_args_parser

from dfa_megatron.cli.main import build_parser
from dfa_megatron.config import MegatronConfig

ROOT = Path(__file__).parents[2]
TORCHRUNS = list(get_args_parser()._option_string_actions)
OF_ANOTHER_LAUNCHER = "--local_rank"
"""DeepSpeed's launcher passes it to a script, torchrun does not; and what abbreviates one option only is harmless."""


def abbreviated(flag: str) -> list[str]:
    """Options of torchrun that it would take the flag for; with more than one it ends with an error."""
    return [] if flag in TORCHRUNS else [option for option in TORCHRUNS if option.startswith(flag)]


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of a parser and its sub-commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_of(command)


def written_in(file: Path) -> Iterator[str]:
    """Every string that is a flag, and every field that is one; scripts need packages that may be absent."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch("--?[a-z][a-z_-]*", text):
                yield text
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="flag"))):
                yield "--" + name.replace("_", "-")


def test_no_flag_is_an_abbreviation_of_torchruns() -> None:
    found = dict.fromkeys(flags_of(build_parser()), "dfa-megatron")
    found |= dict.fromkeys(flags_of(MegatronConfig.add_arguments(argparse.ArgumentParser())), "--dfa-*")
    for folder in ("benchmarks", "examples", "dfa_megatron"):
        for file in (ROOT / folder).rglob("*.py"):
            found |= dict.fromkeys(written_in(file), str(file.relative_to(ROOT)))
    found.pop(OF_ANOTHER_LAUNCHER)
    assert {"--shortest", "--seq-length", "--baselines", "--dfa-schedule"} <= set(found)
    assert abbreviated("--start")  # --start-method and --start_method: an error
    assert {flag: (where, abbreviated(flag)) for flag, where in found.items() if abbreviated(flag)} == {}
