"""Read what Python sources define, without importing them: names, parameters and attributes.

So one interpreter reads every version of a framework, whatever Python or GPU it needs.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """Say where a name is defined: its module, and the statement; None for a submodule."""

    module: str
    node: ast.AST | None


class Sources:
    """Packages in folders, such as a virtual environment's site-packages or a clone."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self.tree, self._text = functools.cache(self._parsed), functools.cache(self._read)

    def _parsed(self, module: str) -> ast.Module | None:
        """Return a module's syntax tree, None if there is no such module; an empty one without a file of its own."""
        text = self._text(module)
        return None if text is None else ast.parse(text)

    def _read(self, module: str) -> str | None:
        """Return a module's source, None if there is no such module; an empty one without a file of its own."""
        for root in self.roots:
            place = root.joinpath(*module.split("."))
            for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
                if file.is_file():
                    return file.read_text(encoding="utf-8")
            if place.is_dir():
                return ""
        return None

    def _may_define(self, module: str, name: str) -> bool:
        """Return whether a module's source has the name or a star; to parse a framework's every module takes long."""
        text = self._text(module)
        return text is not None and (name in text or "import *" in text)

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """Return where a module's name is defined, through its imports; None if it has no such name."""
        first, _, rest = name.partition(".")
        found = self._top(module, first, seen)
        for member in filter(None, rest.split(".")):
            found = None if found is None else self._member(found, member)
        return found

    def _top(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        starred = []
        for node in statements(tree):
            if name in defined(node):
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                source = self._source(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        starred.append(source)
                    elif (alias.asname or alias.name) == name:
                        found = self._top(source, alias.name, seen) or self._submodule(source, alias.name)
                        if found or self.tree(source.partition(".")[0]) is None:  # of a package that is not here
                            return found or Found(module, node)
        for source in starred:
            if self._may_define(source, name) and (found := self._top(source, name, seen)):
                return found
        return self._submodule(module, name)

    def _submodule(self, module: str, name: str) -> Found | None:
        inner = f"{module}.{name}"
        return None if self.tree(inner) is None else Found(inner, None)

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = any((root.joinpath(*parts) / "__init__.py").is_file() for root in self.roots)
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _member(self, owner: Found, name: str) -> Found | None:
        if owner.node is None:
            return self._top(owner.module, name, frozenset())
        for found in self.classes(owner):
            assert isinstance(found.node, ast.ClassDef)
            for node in statements(found.node):
                if name in defined(node):
                    return Found(found.module, node)
            if name in set_on_self(found.node):
                return Found(found.module, found.node)
        return None

    def classes(self, found: Found) -> Iterator[Found]:
        """Yield a class and its bases, as far as they are found."""
        if isinstance(found.node, ast.ClassDef):
            yield found
            for base in found.node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                if inner := self.find(found.module, ast.unparse(base)):
                    yield from self.classes(inner)

    def parameters(self, found: Found) -> tuple[set[str], bool]:
        """Return the names of a function's or constructor's parameters, and whether it takes any other name."""
        if isinstance(found.node, Function):
            of = found.node.args
            return {arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs)} - {"self", "cls"}, bool(of.kwarg)
        if not isinstance(found.node, ast.ClassDef):
            return set(), True
        if made := self._member(found, "__init__"):
            return self.parameters(made)
        fields = [
            node.target for each in self.classes(found) for node in each.node.body if isinstance(node, ast.AnnAssign)
        ]  # type: ignore[union-attr]
        return {target.id for target in fields if isinstance(target, ast.Name)}, False


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, those under `if`, `try` and `with` too, and no inner bodies."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines, imports of modules among them."""
    if isinstance(node, (ast.ClassDef, *Function.__args__)):  # type: ignore[attr-defined]
        return {node.name}  # type: ignore[attr-defined]
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


@functools.cache
def set_on_self(node: ast.ClassDef) -> frozenset[str]:
    """Return the attributes that the methods of a class assign to `self`."""
    return frozenset(
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    )
