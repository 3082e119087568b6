"""Compare the contracts and the package's imports with the sources of the frameworks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.contracts.imports import PACKAGE, imports
from tests.contracts.sources import Found, Sources, reads_of
from tests.contracts.table import ATTENTIONS, TABLE, Contract


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
    for where in ATTENTIONS if package == "megatron.core" else ():
        found = _found(where, sources)
        new = set() if found is None or found.node is None else reads_of(found.node, "config") - _known()
        said += [f"{where} reads config.{name}, which ours does not know" for name in sorted(new)]
    return said


def _known() -> set[str]:
    """Return the fields that check_config.py names; its module needs Megatron, and its source does not."""
    source = (PACKAGE / "megatron" / "check_config.py").read_text(encoding="utf-8")
    (node,) = (
        x.value for x in ast.parse(source).body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "KNOWN"
    )
    assert isinstance(node, ast.Call)
    return set(ast.literal_eval(node.args[0]))


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
