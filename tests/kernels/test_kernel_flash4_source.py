"""flash-attn-4 keeps its compiled functions where the tape looks for them, by the source that is installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from dfa_megatron.kernels.adapters import flash4, flash4_launches

FUNCTIONS = ("_flash_attn_fwd", "_flash_attn_bwd")
"""What the adapter calls."""

NOT_REACHED = {"_flash_attn_fwd_combine": "keys in several splits", "_get_scheduler_metadata": "a schedule made ahead"}
"""Functions of theirs that launch too, each with what the adapter never asks for."""


def installed_source() -> str:
    try:
        return distribution(flash4.PACKAGE).locate_file("flash_attn/cute/interface.py").read_text(encoding="utf-8")  # type: ignore[attr-defined]
    except (PackageNotFoundError, FileNotFoundError):
        pytest.skip(f"{flash4.PACKAGE} is not installed")


def reached(functions: dict[str, ast.FunctionDef]) -> Iterator[ast.FunctionDef]:
    """Yield what the adapter's calls may run in the module."""
    left, seen = list(FUNCTIONS), set(FUNCTIONS)
    while left:
        function = functions[left.pop()]
        yield function
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & functions.keys()
        left += names - seen - NOT_REACHED.keys()
        seen |= names


def complaints(source: str) -> set[str]:
    """Return what the tape would not see, or would look for in vain."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := {*FUNCTIONS, *flash4_launches._LAUNCHING} - functions.keys():
        return {f"no function {name}" for name in missing}
    found, launched = set[str](), set[str]()
    for function in reached(functions):
        served = set[int]()
        for node in ast.walk(function):
            match node:
                case ast.Compare(
                    ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(attr="compile_cache") as use]
                ):
                    served.add(id(use))
                case ast.Subscript(ctx=ast.Store(), value=ast.Attribute(attr="compile_cache") as use):
                    served.add(id(use))
                case ast.Call(
                    func=ast.Subscript(value=ast.Attribute(value=ast.Name(id=owner), attr="compile_cache") as use)
                ):
                    served.add(id(use))
                    launched.add(owner)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr == "compile_cache" and id(node) not in served:
                found.add(f"{function.name} uses a cache otherwise: {ast.unparse(node)}")
    known = set(flash4_launches._LAUNCHING)
    return found | {f"{name} launches unseen" for name in launched - known} | {
        f"{name} launches no more" for name in known - launched
    }  # fmt: skip


def test_the_installed_package_launches_only_what_the_tape_sees() -> None:
    assert complaints(installed_source()) == set()


def stand_in(of: str, body: str) -> str:
    """Return a package of the expected form, with another body of one function."""
    launch = (
        "    if key not in {0}.compile_cache:\n        {0}.compile_cache[key] = make()\n    {0}.compile_cache[key](x)"
    )
    calls = "    " + ", ".join(flash4_launches._LAUNCHING)
    return "\n".join(
        f"def {name}():\n{calls}\n{body if name == of else launch.format(name)}" for name in flash4_launches._LAUNCHING
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("    _cache[key](x)", "_bwd_preprocess launches no more"),
        ("    _bwd_preprocess.compile_cache.get(key)(x)", "_bwd_preprocess uses a cache otherwise"),
        ("    _bwd_preprocess.compile_cache[key](x)\n    new.compile_cache[key](x)", "new launches unseen"),
    ],
)
def test_a_package_that_launches_otherwise_is_noticed(body: str, complaint: str) -> None:
    assert complaints(stand_in("", "")) == set()
    assert any(found.startswith(complaint) for found in complaints(stand_in("_bwd_preprocess", body)))
    assert complaints("") >= {"no function _flash_attn_fwd"}
