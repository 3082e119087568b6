"""Compare the contracts and the package's imports with the sources of the frameworks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.sources import Found, Sources
from tests.contracts.table import TABLE, Contract

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
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if any(name in file.read_text(encoding="utf-8") for name in frameworks):  # to parse all takes long
            found |= _imports_of(file)
    return sorted(each for each in found if any(f"{each.module}.".startswith(f"{name}.") for name in frameworks))


@functools.cache
def _imports_of(file: Path) -> frozenset[Import]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded = {id(each) for node in ast.walk(tree) if isinstance(node, ast.Try) for each in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        named = list[tuple[str, str]]()
        if isinstance(node, ast.ImportFrom) and not node.level:
            named = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        where = str(file.relative_to(PACKAGE))
        found |= {Import(module, name, where, id(node) in guarded) for module, name in named}
    return frozenset(found)


def broken(package: str, sources: Sources, optional: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each contract with a package that its sources break; empty if all hold.

    Args:
        package: a key of `TABLE`.
        optional: names that some supported version lacks, with what the package does then.
    """
    said = [f"{sentence} ({', '.join(row.ours)})" for row in TABLE[package] for sentence in _of_row(row, sources)]
    for each in imports((package,)):
        if each.optional or (optional and f"{each.module}:{each.name}" in optional):
            continue
        present = sources.find(each.module, each.name) if each.name else sources.tree(each.module)
        if present is None:
            said.append(f"{each.module}{':' if each.name else ''}{each.name} is gone ({each.file})")
    return said


def _found(where: str, sources: Sources) -> Found | None:
    module, _, name = where.partition(":")
    return sources.find(module, name)


def _of_row(row: Contract, sources: Sources) -> Iterator[str]:
    name, found = next(((name, found) for name in row.names if (found := _found(name, sources))), (row.names[0], None))
    if found is None:
        yield f"{' or '.join(row.names)} is gone"
        return
    takes, takes_any = sources.parameters(found)
    for each in row.passes:
        if each not in takes and not takes_any:
            yield f"{name} takes no argument {each}"
    if row.replaced is not None:
        yield from (f"{name} has a new parameter {each}" for each in sorted(takes - set(row.replaced)))
    for each in row.attributes:
        if sources.find(*name.split(":")) and not sources.find(name.split(":")[0], f"{name.split(':')[1]}.{each}"):
            yield f"{name} has no {each}"
