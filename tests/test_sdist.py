"""Whatever the tests, the pages' scripts and the Makefile read, and pages link to, lies in the source distribution."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = {"LICENSE", "README.md", "pyproject.toml", ".gitignore"}
"""What the builder puts into every source distribution."""

OURS_ALONE = {".git", ".venv"}
"""What is never in one; tests that look for it do without."""


def included() -> set[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {name.strip("/") for name in settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}


def words(path: Path) -> Iterator[str]:
    """The strings of a Python file, or the words of another one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from re.split(r'[\s="()]+', text)
        return
    yield from (
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def read_at_the_top() -> dict[str, str]:
    """Files and folders beside the package that are named somewhere, with a place that names each."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()}
    top = {path.name for path in ROOT.iterdir()} - OURS_ALONE - ignored
    places = ("tests/**/*.py", "docs/*.py", "Makefile", ".ci/*", "*.md")
    readers = [path for place in places for path in ROOT.glob(place)]
    found = {}
    for path in sorted(path for path in readers if path.is_file()):
        for word in words(path):
            first = word.removeprefix("./").split("/")[0]
            if first in top:
                found.setdefault(first, str(path.relative_to(ROOT)))
    return found


def test_the_source_distribution_has_what_its_tests_read() -> None:
    read = read_at_the_top()
    assert {"patches", ".github", ".ci", "configs"} <= set(read)
    assert {name: where for name, where in read.items() if name not in included() | ALWAYS} == {}


def test_what_is_included_exists() -> None:
    assert [name for name in included() if not (ROOT / name).exists()] == []
