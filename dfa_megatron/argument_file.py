"""Argument files: a script's flags, one a line, with # comments; `@FILE` on a command line stands for what it holds.

--num-layers 32
--spec dfa_megatron.megatron get_spec   # several values on the line of their flag
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dfa_megatron.errors import UnsupportedError


def read_arguments(path: Path) -> list[str]:
    """Return the words of an argument file, split as a shell would split them.

    Raises:
        OSError: the file cannot be read.
        UnsupportedError: a line does not begin with a flag, or a quote is not closed.
    """
    words: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found = shlex.split(line, comments=True)
        except ValueError as error:
            raise UnsupportedError(f"{path}:{number}: {line.strip()}", str(error), "quotes in pairs") from error
        if found and not found[0].startswith("--"):
            raise UnsupportedError(
                f"{path}:{number}: {line.strip()}", "a line begins with a flag", "--flag value, or # and a comment"
            )
        words += found
    return words


def expand(arguments: Sequence[str]) -> list[str]:
    """Replace each `@FILE` by its words, so that later flags override it.

    Raises:
        OSError, UnsupportedError: as `read_arguments`.
    """
    words: list[str] = []
    for argument in arguments:
        words += read_arguments(Path(argument[1:])) if argument.startswith("@") else [argument]
    return words
