"""The size of the house, and how wide its signatures are."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "dfa_megatron"
ELSEWHERE = ("benchmarks", "docs", "examples", "tests")
"""Folders of Python beside the package."""


@dataclass(frozen=True)
class Function:
    """A function as it is written."""

    where: str
    """Its file and its name: `plan/interpret.py:load_plan`."""
    parameters: int
    """Without self, cls and what stars collect."""
    lines: int
    """Without its docstring."""
    triton: bool
    """Whether Triton compiles it."""


def files(tree: Path, *folders: str) -> list[Path]:
    """Every Python file below these folders of a tree."""
    return sorted(path for folder in folders for path in (tree / folder).rglob("*.py"))


@cache
def functions(tree: Path, *folders: str) -> tuple[Function, ...]:
    """Every function and method, inner ones too."""
    places = {path: path.relative_to(tree).as_posix().removeprefix(f"{PACKAGE}/") for path in files(tree, *folders)}
    return tuple(
        Function(f"{place}:{node.name}", _parameters(node), _lines(node), _is_triton(node))
        for path, place in places.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def _is_triton(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def modules_by_folder(tree: Path) -> dict[str, int]:
    """How many modules each folder of the package holds, `__init__` apart."""
    names = (path.relative_to(tree) for path in files(tree, PACKAGE) if path.name != "__init__.py")
    return dict(Counter(path.parent.as_posix() for path in names))


def repeated_names(tree: Path) -> dict[str, list[str]]:
    """File names of the package that occur more than once, and their folders."""
    places: dict[str, list[str]] = {}
    for path in files(tree, PACKAGE):
        if path.name != "__init__.py":
            places.setdefault(path.name, []).append(path.relative_to(tree).parent.as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def repeated_classes(tree: Path) -> dict[str, list[str]]:
    """Names of classes and of type aliases that several modules of the package define, an underscore aside."""
    places: dict[str, list[str]] = {}
    for path in files(tree, PACKAGE):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [node.name] if isinstance(node, ast.ClassDef) else [getattr(one, "id", "") for one in targets]
            for name in (name.lstrip("_") for name in names):
                if name[:1].isupper() and not name.isupper():
                    places.setdefault(name, []).append(path.relative_to(tree).as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def import_closure(module: str) -> list[Path]:
    """Files of the package that a fresh interpreter loads for a module."""
    code = (
        f"import json, sys, {module}; print(json.dumps([getattr(m, '__file__', None) for m in sys.modules.values()]))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, cwd=ROOT)
    own = ROOT / PACKAGE
    return [Path(name) for name in json.loads(done.stdout) if name and own in Path(name).parents]


def lines_by_file(tree: Path, *folders: str) -> dict[str, int]:
    """How many lines each Python file has."""
    return {
        path.relative_to(tree).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in files(tree, *folders)
    }


def pages(tree: Path) -> list[Path]:
    """Markdown of ours, without installed packages."""
    return [path for path in tree.rglob("*.md") if not path.relative_to(tree).as_posix().startswith((".", "build/"))]


GENERATED = re.compile(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", re.DOTALL)
"""A table that `python -m docs.update` writes."""


def words_of_markdown(tree: Path) -> int:
    """Words of all pages, code among them, without generated tables."""
    return sum(len(GENERATED.sub("", page.read_text(encoding="utf-8")).split()) for page in pages(tree))
