"""Find every name that the package imports from the frameworks, by its syntax."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dfa_megatron"


@dataclass(frozen=True, order=True)
class Import:
    """Hold one imported name ("" for a module alone), the file that imports it, and whether it may be missing.

    optional: the import stands in a `try`, or in an `except` that follows one: another version has another name.
    """

    module: str
    name: str
    file: str
    optional: bool


def imports(frameworks: tuple[str, ...]) -> list[Import]:
    """Return the package's imports of these frameworks, in order."""
    return [each for each in _all() if any(f"{each.module}.".startswith(f"{name}.") for name in frameworks)]


@functools.cache
def _all() -> list[Import]:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        guarded = {id(each) for node in ast.walk(tree) if isinstance(node, ast.Try) for each in ast.walk(node)}
        for node in ast.walk(tree):
            for module, name in _named(node):
                found.add(Import(module, name, str(file.relative_to(PACKAGE)), id(node) in guarded))
    return sorted(found)


def _named(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((node.module or "", alias.name) for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
