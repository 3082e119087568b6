"""Find the refusals of an integration: the `raise UnsupportedError(...)` statements, and those that no test reached.

With `DFA_REACHED=FOLDER` in the environment every process of the tests notes in FOLDER where the errors were made.
`python -m tests.support.reached FOLDER FRAMEWORK...` then lists the statements that are missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dfa_megatron.errors import UnsupportedError
from docs.reference import PACKAGE, statements

VARIABLE = "DFA_REACHED"


def note(folder: str) -> None:
    """Note from now on where errors are made, in a file of this process."""
    made, seen = UnsupportedError.__init__, set[str]()

    def noting(self: UnsupportedError, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        frame = sys._getframe(1)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if where not in seen:
            seen.add(where)
            with open(Path(folder, str(os.getpid())), "a", encoding="utf-8") as file:
                print(where, file=file)

    UnsupportedError.__init__ = noting  # type: ignore[method-assign]


def missing(folder: Path, frameworks: Sequence[str]) -> list[str]:
    """Return the statements that were not reached."""
    known = {line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines()}
    return [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for framework in frameworks
        for path, _, calls in statements(framework)
        for call in calls
        if not any(f"{path}:{line}" in known for line in range(call.lineno, (call.end_lineno or 0) + 1))
    ]


if __name__ == "__main__":
    if unreached := missing(Path(sys.argv[1]), sys.argv[2:]):
        sys.exit("no test reached\n" + "\n".join(unreached))
elif folder := os.environ.get(VARIABLE):
    note(folder)  # also in the fork server, from which workers have it
