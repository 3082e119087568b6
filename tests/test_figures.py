"""Measured figures of the pages come from the files of benchmarks/results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("performance", "packed", "kernels", "megatron", "deepspeed", "trust")),
)
FIGURE = re.compile(r"\d ?(GiB|TFLOP/s|tokens/s|ms\b|times as fast)")
SOURCE = re.compile(
    r"benchmarks/results|performance\.md|commit [0-9a-f]{7}|simulat|from the plan|publishes|is kept|out of memory"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_performance", ROOT / "docs" / "update_performance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_of_measured_figures_is_what_the_raw_files_say(script: ModuleType) -> None:
    for name, parts in script.tables().items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert script.page(text, parts) == text, f"{name} is behind: run `python docs/update_performance.py`"


@pytest.mark.parametrize("name", PAGES)
def test_a_paragraph_with_a_measured_figure_names_its_source(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)  # generated
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # shown output
    bare = [part for part in text.split("\n\n") if FIGURE.search(part) and not SOURCE.search(part)]
    assert bare == []


def test_a_cell_that_stands_for_two_rows_or_none_is_an_error(script: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("performance_tables", ROOT / "docs" / "performance_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for where in ({"seq_length": 131072}, {"seq_length": 1}):
        with pytest.raises(LookupError, match="rows of"):
            tables.row(tables.GRID, **where)
