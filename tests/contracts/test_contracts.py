"""The frameworks that are installed keep every contract, and a broken one is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.contracts.check import broken, imports
from tests.contracts.sources import Sources
from tests.contracts.table import TABLE, Contract, on


def test_installed_frameworks_keep_their_contracts() -> None:
    folders = {package: folder for package in TABLE if (folder := _folder(package))}
    read = {folder: Sources([folder]) for folder in folders.values()}  # each file once
    assert [said for package, folder in folders.items() for said in broken(package, read[folder])] == []


def _folder(package: str) -> Path | None:
    """Return the folder that holds an installed package, None without one."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parents[package.count(".")]


def test_every_file_that_a_contract_names_exists() -> None:
    package = Path(__file__).parents[2] / "dfa_megatron"
    named = {file for rows in TABLE.values() for row in rows for file in row.ours}
    assert {file for file in named if not (package / file).exists()} == set()


@pytest.fixture
def framework(tmp_path: Path) -> Sources:
    """A framework of three modules, with what real ones have: re-exports, bases, fields, stars and optional imports."""
    files = {
        "frame/__init__.py": "from .inner import *\nfrom .inner import made as other\n",
        "frame/inner.py": (
            "import typing\ntry:\n    from absent import kernel\nexcept ImportError:\n    kernel = None\n"
            "def made(a, b=1, *, c): pass\ndef open_(a, **more): pass\n"
            "class Base:\n    def __init__(self, config):\n        self.config = config\n        self.kept = 1\n"
            "class Child(Base):\n    field: int = 0\n    def run(self, x): pass\n"
        ),
        "frame/fields.py": "class Fields:\n    first: int\n    second: str = ''\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Sources([tmp_path])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (on("frame:made", "f", passes="a c", replaced="a b c"), []),
        (on("frame:other", "f"), []),
        (on("frame.inner:kernel", "f"), []),
        (on("frame:open_", "f", passes="anything"), []),
        (on("frame:Child", "f", attributes="config kept field run"), []),
        (on("frame:Child.run", "f", replaced="x"), []),
        (on("frame.fields:Fields", "f", passes="first second", attributes="second"), []),
        (on("frame:newer frame:made", "f"), []),
        (on("frame:gone", "f"), ["frame:gone is gone"]),
        (on("frame.none:made", "f"), ["frame.none:made is gone"]),
        (on("frame:made", "f", passes="d"), ["frame:made takes no argument d"]),
        (on("frame:made", "f", replaced="a b"), ["frame:made has a new parameter c"]),
        (on("frame:Child", "f", attributes="config cap"), ["frame:Child has no cap"]),
        (on("frame.fields:Fields", "f", passes="third"), ["frame.fields:Fields takes no argument third"]),
    ],
)
def test_a_broken_contract_is_named(
    framework: Sources, row: Contract, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "frame", (row,))  # type: ignore[arg-type]
    assert broken("frame", framework) == [f"{sentence} (f)" for sentence in said]


def test_the_packages_imports_are_found_with_whether_they_may_be_missing() -> None:
    found = {(each.module, each.name): each.optional for each in imports(tuple(TABLE))}
    assert len(found) > 60
    assert found["megatron.core.packed_seq_params", "PackedSeqParams"] is False
    assert found["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"] is True
