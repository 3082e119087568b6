"""The picture of docs/architecture.md shows the imports as they are."""

from __future__ import annotations

import re
from pathlib import Path

from docs import house_picture as script

ROOT = Path(__file__).parents[1]


def test_the_picture_is_drawn_from_the_imports_of_today() -> None:
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture(), "run `python -m docs.update`"


def test_every_box_stands_above_what_it_imports() -> None:
    arrows, rows = script.imports(), script.layers(script.reduced(script.imports()))
    height = {name: at for at, row in enumerate(rows) for name in row}
    assert set(height) == set(arrows)
    assert all(height[here] < height[target] for here, targets in arrows.items() for target in targets)


def test_every_file_that_the_page_names_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = text.split("## From a call to a kernel")[1].split("**Who owns what.**")[0]
    names = set(re.findall(r"\b((?:runtime|plan|kernels)/[\w/]*\w+\.py)", walk)) | {"attention.py"}
    missing = sorted(name for name in names if not (ROOT / "dfa_megatron" / name).is_file())
    assert len(names) >= 10
    assert missing == []
