"""docs/schedules.md cannot lie: its tables and pictures are what the code computes today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_schedules", DOCS / "update_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_code(script: ModuleType) -> None:
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    assert script.page(text) == text, "run `python docs/update_schedules.py`"


def test_the_pictures_are_those_of_the_code_and_all_are_shown(script: ModuleType) -> None:
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    for name, svg in script.pictures().items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == svg, "run `python docs/update_schedules.py`"
        assert f"pictures/{name}" in text


def test_the_grid_that_is_explained_is_the_golden_one() -> None:
    golden = (DOCS.parent / "tests" / "golden" / "balanced_p8.txt").read_text(encoding="utf-8")
    grid = golden.split("\n\n")[0].rsplit("\n", 1)[0]  # without the last row, in which only results travel
    assert grid in (DOCS / "schedules.md").read_text(encoding="utf-8")
