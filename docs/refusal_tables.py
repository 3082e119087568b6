"""The tables of refusals.md, made from the integrations' `raise UnsupportedError(...)`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dfa_megatron"
_HEAD = ("", "| refused | because | what works |", "|---|---|---|")


def statements(framework: str) -> Iterator[tuple[Path, ast.Module, list[ast.Call]]]:
    """Yield each module of a framework, and the errors of its `raise UnsupportedError(...)`, by line."""
    for path in sorted((PACKAGE / framework).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        calls = [exc for exc in raised if isinstance(exc, ast.Call) and ast.unparse(exc.func) == "UnsupportedError"]
        yield path, tree, sorted(calls, key=lambda call: call.lineno)


def of_statements(framework: str) -> list[str]:
    """Return a framework's refusals: the first line of each module that has some, and a table of them."""
    lines = []
    for _, tree, calls in statements(framework):
        if calls:
            title = (ast.get_docstring(tree) or "").splitlines()[0].rstrip(".")
            lines += [f"### {title}", *_HEAD, *(row for call in calls for row in _rows(call, tree)), ""]
    return lines


def _rows(call: ast.Call, tree: ast.Module) -> Iterator[str]:
    """Yield the row of a statement, or those of the dictionary from which it takes its texts: `*REFUSED[name]`.

    A constant pair of texts, `*OTHER_ORDER`, may stand in any module.
    """
    near = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and 0 < call.lineno - node.lineno < 9]
    near.sort(key=lambda node: node.lineno)
    local = {ast.unparse(x.targets[0]): x.value for x in near if isinstance(x.value, ast.JoinedStr)}
    first, *rest = (local.get(arg.id, arg) if isinstance(arg, ast.Name) else arg for arg in call.args)
    if not isinstance(rest[0], ast.Starred):
        yield _row([_text(arg) for arg in (first, *rest)])
        return
    if isinstance(rest[0].value, ast.Name):
        pair = _everywhere()[rest[0].value.id]
        assert isinstance(pair, ast.Tuple)
        yield _row([_text(arg) for arg in (first, *pair.elts)])
        return
    assert isinstance(rest[0].value, ast.Subscript)
    table = _constants(tree)[ast.unparse(rest[0].value.value)]
    assert isinstance(table, ast.Dict)
    for key, value in zip(table.keys, table.values, strict=True):
        assert key is not None
        value = _everywhere()[value.id] if isinstance(value, ast.Name) else value
        assert isinstance(value, ast.Tuple)
        asked = _text(first).replace(_text(rest[0].value.slice), _text(key))
        yield _row([asked, *map(_text, value.elts)])


def _row(cells: list[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _text(node: ast.expr) -> str:
    """Return a text as readers are to see it, with the names of what it is made of in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value)
    if isinstance(node, ast.Name) and (constant := _everywhere().get(node.id)) is not None:
        return _text(constant)
    return "{" + ast.unparse(node) + "}"


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the constants of a module, by name."""
    assigned = {
        ast.unparse(target): node.value for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    }
    return {name: value for name, value in assigned.items() if name.isupper()}


@functools.cache
def _everywhere() -> dict[str, ast.expr]:
    """Return the constant texts, and pairs of texts, of the integrations."""
    found: dict[str, ast.expr] = {}
    for framework in ("deepspeed", "huggingface", "megatron"):
        for path in (PACKAGE / framework).rglob("*.py"):
            for name, value in _constants(ast.parse(path.read_text(encoding="utf-8"))).items():
                if isinstance(value, (ast.JoinedStr, ast.Tuple)) or (
                    isinstance(value, ast.Constant) and type(value.value) is str
                ):
                    found[name] = value
    return found
